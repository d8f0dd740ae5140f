#!/usr/bin/env bash
# Everything that is measured on two GPUs of one host, part after part, each with a limit, few lines printed.
#   PYTHONPATH=SITE bash benchmarks/two_gpus.sh OUT [PART ...]          PART: tests dispatch model memory trace deepep
# Environment: DATA (manifest.json of `megatron-moe tokenize`; mock data without), UPSTREAM (unpatched tree with its
# dataset helper compiled; upstream's variants need it), WHEEL (folder of DeepEP's unpacked wheel), NCCL (lib and include
# of 2.30.4 or later, for DeepEP's newer interface), PLAN (of gpu_step.py), MODEL_SECONDS (no further run of the model
# starts after so many), TRACE_OF, TRACE_LAYERS, TRACE_AT (what is traced: variant, layers, micro-batch), DEVICE=cpu (rehearses
# with toys over gloo), PYTHON.
set -uo pipefail
out=${1:?usage: two_gpus.sh OUT [PART ...]}
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(tests dispatch model memory trace deepep)
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
device=${DEVICE:-cuda}
python=${PYTHON:-python3}
work=$(mktemp -d)
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONUNBUFFERED=1
export PYTHONPATH="$root/build/megatron:$root:${PYTHONPATH:-}"
plan=${PLAN:-preset-dedup-expandable@8,upstream@8,preset-dense@8,preset-unspread@6,preset@6,preset-dedup-selective@8,preset-dedup-forced-expandable@8,upstream-forced@8,preset-monitor@6}
waiting=()

# shellcheck source=benchmarks/parts.sh
. "$here/parts.sh"

# Starts a command that loads its imports now and waits for its turn.
ahead() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  : >"$work/$name.log" # there for the tail of its turn, however soon that comes
  timeout -k 10 "$limit" "$@" --wait-for "$work/$name.go" >"$work/$name.log" 2>&1 &
  waiting+=("$!")
}

# Lets it go on, shows what it prints as it comes, and waits for its end.
turn() { # NAME PID
  local name=$1 pid=$2 begin=$SECONDS rc=0
  echo "== $name"
  touch "$work/$name.go"
  tail -n +1 -f --pid="$pid" "$work/$name.log"
  wait "$pid" || rc=$?
  echo "== $name: rc $rc, $((SECONDS - begin)) s"
}

trap '[ ${#waiting[@]} -eq 0 ] || kill "${waiting[@]}" 2>/dev/null; cat "$work"/*.log >"$out/log.txt" 2>/dev/null; rm -rf "$work"' EXIT

small=()
toy=()
own=(megatron)
if [ "$device" = cpu ]; then
  own=() # it needs CUDA streams
  small=(--tokens 32 256 --hidden 64 --repeats 3)
  toy=(--device cpu --global-batch 48)
else
  toy=(--global-batch 48) # 3 micro-batches of 8 on each of two ranks, 4 of 6, 6 of 4
fi
data=()
[ -z "${DATA:-}" ] || data=(--data "$DATA")
upstream=()
[ -z "${UPSTREAM:-}" ] || upstream=(--upstream "$UPSTREAM")

if asked model; then
  ahead model 900 "$python" "$here/gpu_step.py" --ranks 2 --layers 16 --steps 6 "${toy[@]}" "${data[@]}" "${upstream[@]}" \
    --plan "$plan" --until "${MODEL_SECONDS:-280}" --limit 130 --work "$work/model" --out "$out/gpu_step-x2.json"
  model=$!
fi
asked tests && part tests 150 '^(transfers|layers|monitor|upcycling|checkpoints): ' "$python" "$root/tests/gpu/test_two_gpus.py"
if asked dispatch; then
  part dispatch 120 'Error' "$python" -m torch.distributed.run --standalone --nproc-per-node=2 \
    "$here/dispatch_ep.py" --ranks-per-node 1 --dispatchers alltoall "${own[@]}" dedup dedup-static twohop \
    "${small[@]}" --out "$out/dispatch_ep-x2.json"
  "$python" "$here/dispatch_ep.py" --show "$out/dispatch_ep-x2.json"
fi
if asked memory; then
  ahead memory 900 "$python" "$here/memory_runs.py" --device "$device" --work "$work/memory" --out "$out/memory_runs-x2.json"
  memory=$!
fi
if asked trace; then
  profile="--profile --use-pytorch-profiler --profile-step-start 4 --profile-step-end 6"
  ahead trace 900 "$python" "$here/gpu_step.py" --ranks 2 --layers "${TRACE_LAYERS:-4}" --steps 7 "${toy[@]}" "${data[@]}" \
    --plan "profiled@${TRACE_AT:-8}" \
    --also "profiled=${TRACE_OF:-preset-dedup} $profile --tensorboard-dir $out/trace/tensorboard" --limit 70 --work "$work/trace"
  trace=$!
fi
asked model && turn model "$model"
asked memory && turn memory "$memory"
if asked trace; then
  turn trace "$trace"
  part trace-read 40 '.' "$python" -m megatron_ext.cli trace "$out/trace" --top 6 --json "$out/trace-x2.json"
fi
if asked deepep && [ -n "${WHEEL:-}" ]; then
  part deepep 180 'import|ms' "$python" "$here/deepep_nvlink.py" --wheel "$WHEEL" --out "$out/deepep_nvlink-x2.json"
  if [ -n "${NCCL:-}" ]; then
    part deepep-newer 180 'import|ms' "$python" "$here/deepep_nvlink.py" --wheel "$WHEEL" --nccl "$NCCL" \
      --out "$out/deepep_newer-x2.json"
  fi
fi
exit 0
