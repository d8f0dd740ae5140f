#!/usr/bin/env bash
# Installs what the tests need from the system: a browser for the report's page. Does nothing where it is there.
# Usage: system.sh          (as root on Debian or Ubuntu; elsewhere it says what to install and goes on)
set -euo pipefail
say() { echo "[setup] $*"; }

for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  say "no Chromium here: the report's browser tests will be skipped; install the package chromium to run them"
  exit 0
fi
say "installing chromium for the report's browser tests"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    chromium fonts-dejavu-core; } >"$log" 2>&1; then
  tail -n 3 "$log"
  say "chromium could not be installed: the report's browser tests will be skipped"
fi
