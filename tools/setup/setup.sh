#!/usr/bin/env bash
# Makes everything that `make demo` and `make test` need, inside the checkout; a second run finds it done.
# Usage: setup.sh [venv|tree|all]        (default all)
#   venv   .venv with the locked packages and the two commands
#   tree   build/megatron: fetched, verified, patched; its dataset helper compiled
set -euo pipefail
cd "$(dirname "$0")/../.."
what=${1:-all}
lock=tools/requirements/dev.txt
say() { echo "[setup] $*"; }

make_venv() {
  local want have
  want=$(cat "$lock" tools/requirements/bootstrap.txt pyproject.toml setup.py | sha256sum | cut -d' ' -f1)
  have=$(cat .venv/.locked 2>/dev/null || true)
  if [ "$want" = "$have" ] && .venv/bin/python -c '' 2>/dev/null; then say "venv: up to date"; return; fi
  local python
  python=$(bash tools/setup/find_python.sh)
  say "venv: $("$python" --version) from $python"
  sound_venv "$python"
  .venv/bin/python -m pip install -q --disable-pip-version-check --require-hashes --no-deps -r tools/requirements/bootstrap.txt
  say "venv: installing the locked packages (about 5 GB of torch and CUDA libraries the first time)"
  # uv links from its cache instead of copying, so a warm cache makes this seconds.
  .venv/bin/uv pip sync -q --python .venv/bin/python --require-hashes "$lock" tools/requirements/bootstrap.txt
  .venv/bin/uv pip install -q --python .venv/bin/python --no-deps --no-build-isolation -e .
  # The patched Megatron goes first on the path; a plain file keeps it visible to every tool.
  .venv/bin/python - <<'PY'
import pathlib, sysconfig
site = pathlib.Path(sysconfig.get_path("purelib"))
(site / "_megatron_patched.pth").write_text(f"{pathlib.Path.cwd() / 'build' / 'megatron'}\n")
PY
  compile_bytecode "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/{torch,numpy,sympy,mpmath,networkx,transformers/utils,jinja2,rich,bokeh,trackio,pydantic,tensorboard,psutil,yaml}
  echo "$want" > .venv/.locked
}

# A setup that was stopped, or ran out of disk, can leave an environment without pip; one of an older Python may be there
# for something else. Both are made anew, out of uv's cache.
sound_venv() {  # sound_venv PYTHON
  if PYTHON=.venv/bin/python bash tools/setup/find_python.sh >/dev/null 2>&1 \
    && .venv/bin/python -m pip --version >/dev/null 2>&1; then return; fi
  "$1" -m venv --clear .venv
}

# uv installs no bytecode, and where PYTHONDONTWRITEBYTECODE is set every start would compile torch and Megatron again:
# about 5 s of a rank's start. Packages that a lock no longer has are skipped.
compile_bytecode() {
  local folder folders=()
  for folder in "$@"; do [ -d "$folder" ] && folders+=("$folder"); done
  env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -W ignore -m compileall -q -j 0 "${folders[@]}" >/dev/null 2>&1 || true
}

make_tree() {
  .venv/bin/python -m tools.mpatch apply
  .venv/bin/python tools/setup/build_helpers.py
  compile_bytecode build/megatron/megatron megatron_ext tools
}

case $what in
  venv) make_venv ;;
  tree) make_tree ;;
  all) make_venv; make_tree ;;
  *) sed -n '2,5p' "$0" >&2; exit 64 ;;
esac
