#!/usr/bin/env bash
# Packs what benchmarks and tests need on a GPU machine that has torch and nothing else of ours, and no network.
#   benchmarks/carry/pack.sh OUT --data MANIFEST --te WHEEL [--cublas VERSION] [--sm 90]
# MANIFEST: manifest.json of `megatron-moe tokenize`. WHEEL: transformer_engine_torch built for that machine's torch.
# Makes OUT/site.tar.xz (Python packages), OUT/trees.tar.xz (this checkout's HEAD, patched and unpatched Megatron, the
# data) and with --cublas OUT/cublas.tar.xz. There: unpack all into one folder DIR, then `. DIR/repo/benchmarks/carry/env.sh DIR`.
set -euo pipefail
out=${1:?usage: pack.sh OUT --data MANIFEST --te WHEEL [--cublas VERSION] [--sm 90]}
shift
data='' te='' cublas='' sm=90
while [ $# -gt 0 ]; do
  case $1 in
    --data) data=$2 ;;
    --te) te=$2 ;;
    --cublas) cublas=$2 ;;
    --sm) sm=$2 ;;
    *) echo "pack.sh: unknown option $1" >&2; exit 64 ;;
  esac
  shift 2
done
[ -f "$data" ] && [ -f "$te" ] || { echo "pack.sh: --data and --te must name files that exist" >&2; exit 64; }
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$root/.venv/bin/python
version=$(basename "$te" | cut -d- -f2) # of Transformer Engine: all its wheels must agree
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What Megatron imports there; torch, triton, numpy, transformers and pytest are the machine's own.
get() { "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64 --platform any -d "$@"; }
# Of our own lock, what that machine lacks: tables, the report, fast JSON, tests side by side.
locked() { for name in "$@"; do grep -hoE "^$name==[^ ;]+" "$root"/tools/requirements/*.txt | head -n 1; done; }
if [ ! -f "$out/site.tar.xz" ]; then
  mapfile -t own < <(locked orjson rich markdown-it-py mdurl pygments bokeh narwhals pillow tornado xyzservices \
    pytest-xdist execnet)
  mkdir "$work/wheels"
  get "$work/wheels" "transformer-engine==$version" "transformer-engine-cu13==$version" omegaconf==2.4.0 \
    pydantic==2.12.4 pydantic-core==2.41.5 annotated-types==0.8.0 typing-inspection==0.4.5 importlib-metadata==10.2.0 \
    nvdlfw-inspect==0.2.2 emerging-optimizers==0.3.0 einops==0.8.2 "${own[@]}"
  "$python" -m pip wheel -q --no-deps -w "$work/wheels" antlr4-python3-runtime==4.9.3 # only an sdist: pure Python
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$work"/wheels/*.whl "$te"
  rm -rf "$work/site/transformer_engine/jax" "$work/site/bin"
  "$python" "$root/benchmarks/carry/one_card.py" --sm "$sm" "$work"/site/transformer_engine/wheel_lib/lib*.so
  tar c -C "$work" site | xz -T0 -6 >"$out/site.tar.xz"
fi

mkdir -p "$work/repo/build" "$work/upstream"
git -C "$root" archive HEAD | tar x -C "$work/repo"
cp -r "$root"/build/megatron "$root"/build/{pins,files}.json "$work/repo/build/"
cache=${MPATCH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/mpatch}
tar x -C "$work/upstream" --strip-components 1 -f "$(find "$cache" -name 'megatron_core-*.tar.gz' | sort | tail -n 1)"
cp "$root"/build/megatron/megatron/core/datasets/helpers_cpp*.so "$work/upstream/megatron/core/datasets/"
printf 'all:\n' >"$work/upstream/megatron/core/datasets/Makefile" # upstream runs make there; the sdist has no makefile
cp -r "$(dirname "$data")" "$work/data"
find "$work" -name __pycache__ -prune -exec rm -rf {} +
tar c -C "$work" repo upstream data | xz -T0 -3 >"$out/trees.tar.xz"

if [ -n "$cublas" ] && [ ! -f "$out/cublas.tar.xz" ]; then
  get "$work/newer" "nvidia-cublas==$cublas"
  "$python" -m zipfile -e "$work"/newer/*.whl "$work/newer"
  mkdir "$work/cublas"
  cp "$work"/newer/nvidia/cu13/lib/libcublas{,Lt}.so.13 "$work/cublas/"
  "$python" "$root/benchmarks/carry/one_card.py" --sm "$sm" "$work"/cublas/*.so.13
  tar c -C "$work" cublas | xz -T0 -6 >"$out/cublas.tar.xz"
fi
ls -l "$out"
