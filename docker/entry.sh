#!/usr/bin/env bash
# Entry of the images: says what is in this container, then runs the command it was given.
set -euo pipefail
megatron-moe doctor >&2 || true
exec "$@"
