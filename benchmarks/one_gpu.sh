#!/usr/bin/env bash
# What is measured on one GPU, part after part, each with a limit, few lines printed. On a machine of two, run other parts
# on the other one beside it (CUDA_VISIBLE_DEVICES).
#   DATA=MANIFEST UPSTREAM=TREE bash benchmarks/one_gpu.sh OUT [PART ...]     PART: step loss forced profile observe tests
# step: upstream, preset and dense in turn, three times (about 370 s). loss: 200 steps of upstream and preset (about 420 s).
# DATA: manifest.json of `megatron-moe tokenize`. UPSTREAM: unpatched tree with its dataset helper compiled and a makefile
# beside it. benchmarks/carry brings both, and the newer cuBLAS that the preset profits from, to a machine without network.
# STEP_PLAN, STEP_SECONDS: another plan (of gpu_step.py) and limit for step; MORE_PLAN, MORE_SECONDS: those of the part `more`.
set -uo pipefail
out=${1:?usage: one_gpu.sh OUT [PART ...]}
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(step loss forced profile observe tests)
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
python=${PYTHON:-python3}
: "${DATA:?set DATA to the manifest.json of the tokenized text}"
: "${UPSTREAM:?set UPSTREAM to an unpatched Megatron tree}"
[ -f "$UPSTREAM/megatron/core/datasets/Makefile" ] || {
  echo "one_gpu.sh: $UPSTREAM/megatron/core/datasets has no Makefile; upstream runs make there at each start and fails" \
    "without one: write one with the empty target 'all:'" >&2
  exit 64
}
work=$(mktemp -d)
trap 'cat "$work"/*.log >"$out/log-$$.txt" 2>/dev/null; rm -rf "$work"' EXIT
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONUNBUFFERED=1
export PYTHONPATH="$root/build/megatron:$root:${PYTHONPATH:-}"
# shellcheck source=benchmarks/parts.sh
. "$here/parts.sh"

steps() { # NAME SECONDS PLAN OPTIONS...
  local name=$1 limit=$2 plan=$3
  shift 3
  part "$name" "$limit" 'TFLOP/s +|failed| / ' "$python" "$here/gpu_step.py" --data "$DATA" --upstream "$UPSTREAM" \
    --work "$work/$name" --out "$out/$name.json" --plan "$plan" "$@"
}

turn=upstream@8,preset@16,preset-dense@16
asked step && steps step "${STEP_SECONDS:-400}" "${STEP_PLAN:-$turn,$turn,$turn}" --steps 7 --limit 100
asked more && steps more "${MORE_SECONDS:-200}" "${MORE_PLAN:?set MORE_PLAN to a plan of gpu_step.py}" --steps 7 --limit 100
asked loss && steps loss 560 upstream@8,preset@16 --steps 200 --global-batch 16 --limit 330
asked forced && steps forced 120 upstream-forced@8,preset-forced@16 --steps 7 --limit 100
asked profile && part profile 90 '^step|^  ' "$python" "$here/gpu_profile.py" --data "$DATA" --micro-batch 16 \
  --json "$out/profile.json"
asked observe && part observe 170 'ms |MB |longer' "$python" "$here/observe_overhead.py" --device cuda \
  --json "$out/observe_overhead.json"
asked tests && part tests 480 '^passed|^failed|^E  |[0-9] passed|[0-9] failed|values|cases' env PYTHON="$python" bash \
  "$root/tests/gpu/run.sh" "$root/tests/gpu" --ignore="$root/tests/gpu/test_two_gpus.py"
exit 0
