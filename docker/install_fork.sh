#!/usr/bin/env bash
# The patched Megatron and megatron_ext into this image. The Dockerfiles and build_enroot.sh run it in /opt/moe.
# Usage: install_fork.sh train|cpu
#   train   into the base image's own Python, whose torch and Transformer Engine stay
#   cpu     into a virtual environment made from the lock file
set -euo pipefail
cd /opt/moe
case ${1:-} in
  train)
    : "${TRACKIO:?is read from upstream.toml}" "${GROUPED_GEMM:?is read from upstream.toml}" "${DEEPEP:?is read from upstream.toml}"
    # The base image constrains versions of everything it holds; what it lacks is added, nothing is replaced.
    export PIP_CONSTRAINT=
    python3 -m pip install --no-cache-dir "trackio==$TRACKIO" tokenizers rich jinja2 tensorboard packaging pybind11 unidiff
    # Both build against the image's CUDA; a base that lacks their toolchain still trains with the all-to-all dispatcher.
    python3 -m pip install --no-cache-dir --no-deps --no-build-isolation "nv-grouped-gemm==$GROUPED_GEMM" \
      || echo "warning: grouped_gemm was not built" >&2
    python3 -m pip install --no-cache-dir --no-deps "sgl-deep-ep==$DEEPEP" || echo "warning: DeepEP was not installed" >&2
    python3 -m tools.mpatch apply
    python3 -m pip install --no-cache-dir --no-deps --no-build-isolation -e .
    python3 - <<'PY'
import pathlib, sysconfig
site = pathlib.Path(sysconfig.get_path("purelib"))
(site / "_megatron_patched.pth").write_text("/opt/moe/build/megatron\n")
PY
    python3 tools/setup/build_helpers.py
    ;;
  cpu) bash tools/setup/setup.sh all ;;
  *) sed -n '3,5p' "$0" >&2; exit 64 ;;
esac
