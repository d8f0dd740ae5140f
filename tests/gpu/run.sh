#!/usr/bin/env bash
# tests/gpu in one command, within 8 minutes on one H200: side by side on the card where pytest-xdist is installed.
#   bash tests/gpu/run.sh [FILES AND PYTEST OPTIONS ...]        (all of tests/gpu by default)
# Environment: PYTHON; PROCESSES (of pytest, 8 by default; 0: one test after the other).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
[ $# -gt 0 ] || set -- "$here"
# Else every test fails in its own words.
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "run.sh: torch finds no GPU here; make test has the tests that need none" >&2
  exit 69
}
spread=()
# A file is one process's, since its tests share fixtures; at 8, no file waits for another.
if "$python" -c 'import xdist' 2>/dev/null; then
  spread=(-n "${PROCESSES:-8}" --dist loadfile)
fi
exec "$python" -m pytest "${spread[@]}" -m gpu -q -p no:cacheprovider --timeout 240 --durations 12 "$@"
