#!/usr/bin/env bash
# Prints the path of a Python that can train (3.12 or newer, as megatron-core asks), or says in one line what is missing.
# Usage: find_python.sh [MINIMUM]        e.g. find_python.sh 3.12
# Looks on PATH, then in pyenv's versions whatever the active one is, then asks uv. PYTHON=/path/to/python overrides.
# The preferred series comes first in each place, because the GPU wheels are built for it.
set -euo pipefail
minimum=${1:-3.12}

good() {  # An interpreter that starts, is new enough and can make virtual environments.
  "$1" - "$minimum" >/dev/null 2>&1 <<'PY'
import sys, venv
sys.exit(sys.version_info[:2] < tuple(map(int, sys.argv[1].split("."))))
PY
}

if [ -n "${PYTHON:-}" ]; then
  if good "$PYTHON"; then echo "$PYTHON"; exit 0; fi
  echo "error: PYTHON=$PYTHON does not start, or is older than $minimum, or has no venv module" >&2
  exit 1
fi

candidates=("python$minimum" python3.12 python3.13 python3.14 python3)
for name in "${candidates[@]}"; do
  # pyenv's shims are on PATH for versions that are not active; `good` weeds them out.
  if found=$(command -v "$name") && good "$found"; then "$found" -c 'import sys; print(sys.executable)'; exit 0; fi
done
for root in "${PYENV_ROOT:-$HOME/.pyenv}" /opt/pyenv; do
  for name in "${candidates[@]}"; do
    for found in "$root"/versions/*/bin/"$name"; do
      if [ -x "$found" ] && good "$found"; then echo "$found"; exit 0; fi
    done
  done
done
if command -v uv >/dev/null; then
  if found=$(uv python find --no-project ">=$minimum" 2>/dev/null) && good "$found"; then echo "$found"; exit 0; fi
  if uv python install -q "$minimum" >/dev/null 2>&1 && found=$(uv python find --no-project "$minimum" 2>/dev/null) \
    && good "$found"; then echo "$found"; exit 0; fi
fi
echo "error: no Python >= $minimum with venv: none on PATH, under pyenv or through uv; install one, or set PYTHON=/path/to/python" >&2
exit 1
