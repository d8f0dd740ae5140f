#!/usr/bin/env bash
# Trains a small dense language model on real text, upcycles it into a mixture of experts, trains that, and shows what
# happened. Real Megatron on two CPU cores, no GPU, no download. Minutes. `make demo` sets everything up first; with an
# installed wheel run it in the folder that `megatron-moe examples DIR` made, with the environment on PATH.
#
# Usage: quickstart.sh [OUT]        (default runs/quickstart)
#   DEVICE=auto|cpu|cuda (default cpu)   DENSE_STEPS, MOE_STEPS: length of the runs
#
# What it does, each step with its full log under OUT/logs:
#   1 text that this Python carries (prose, code) -> tokenizer -> Megatron's .bin/.idx, 5 % held out
#   2 dense run, checkpoint
#   3 that checkpoint upcycled to 8 experts, top-2, and trained: expert parallel 2 over gloo
#   4 the dense run continued for the same tokens
#   5 the same MoE from scratch, for as many tokens as the upcycled one got
#   6 table and report.html
# A second call goes on where the first one stopped.
set -euo pipefail
# shellcheck source=examples/moe/lib.sh
. "$(dirname "$0")/lib.sh"
case ${1:-} in
  -h|--help) usage "$0" ;;
  -*) die "there is no option $1" "bash $0 --help" ;;
esac
cd "$(dirname "$0")/../.."

OUT=${1:-runs/quickstart}
DEVICE=${DEVICE:-cpu}
DENSE_STEPS=${DENSE_STEPS:-100}
MOE_STEPS=${MOE_STEPS:-80}
RANKS=2
export PATH="$PWD/.venv/bin:$PATH"   # a checkout's own environment; without one, the one that is active
if ! command -v megatron-moe >/dev/null || ! command -v torchrun >/dev/null; then
  echo "error: megatron-moe and torchrun are not on PATH" >&2
  echo "try:   make setup, or activate the environment that megatron-moe is installed in" >&2
  exit 64
fi
# One thread a rank: two ranks fill two cores, and more threads only wait for each other.
export OMP_NUM_THREADS=1
mkdir -p "$OUT/logs"

# A checkpoint every 20 steps: 18 MB of the dense model, 81 MB of an MoE. A disk that fills while one is written would be
# an error of torch's that does not say so, in a log that the full disk cuts short.
dense_saves=$(((DENSE_STEPS + MOE_STEPS) / 20)) moe_saves=$((2 * MOE_STEPS / 20))
missing=$((50 + 18 * dense_saves + 81 * moe_saves - $(du -sm "$OUT" | cut -f1)))
free=$(df -Pm "$OUT" | awk 'NR == 2 { print $4 }')
if [ "$free" -lt "$missing" ]; then die "$OUT needs $missing MB more and its disk has $free" "bash $0 OTHER_FOLDER"; fi

MODEL_ARGS=(
  --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4
  --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
  --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
)
MOE_ARGS=(
  --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
  --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-router-dtype fp32 --moe-per-layer-logging
)
DATA_ARGS=(
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$OUT/data/tokenizer"
  --per-split-data-args-path "$OUT/data/blend.json" --moe-ext-manifest "$OUT/data/manifest.json" --num-workers 1
)
TRAIN_ARGS=(
  --micro-batch-size 4 --global-batch-size 16 --use-distributed-optimizer
  --lr 3e-3 --lr-decay-style constant --lr-warmup-iters 10 --lr-decay-iters "$((DENSE_STEPS + MOE_STEPS))"
  --adam-beta2 0.98 --weight-decay 0.1 --clip-grad 1.0
  --save-interval 20 --log-interval 1 --eval-interval 20 --eval-iters 4
  --timing-log-level 1 --log-timers-to-tensorboard
)

say() { printf '\n[quickstart] %s\n' "$*"; }

finished() {  # A run that has saved its last step needs no second start.
  [ "$(cat "$OUT/$1/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null)" = "$2" ]
}

# Megatron's log goes to a file, its progress to the terminal; on an error the end of the log is shown.
train() {  # NAME LAST-STEP FLAGS...
  local name=$1 steps=$2; shift 2
  if finished "$name" "$steps"; then echo "  $name: done before, step $steps"; return; fi
  local log=$OUT/logs/$name.log
  : > "$log"
  torchrun --standalone --nproc-per-node "$RANKS" --no-python megatron-moe train --device "$DEVICE" -- \
    "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAIN_ARGS[@]}" --train-iters "$steps" \
    --moe-ext-run-dir "$OUT/$name" --moe-ext-project quickstart --moe-ext-run-name "$name" \
    --save "$OUT/$name/checkpoints" "$@" > "$log" 2>&1 &
  local run=$!
  # Not a pipe from torchrun: a rank that is killed can leave a checkpoint helper behind that holds the pipe open.
  tail --pid="$run" -n +1 -f "$log" | progress "$name"
  wait "$run" || {
    echo "error: the $name run failed; the full log is $log" >&2
    grep -E '^(error|where|why|try):' "$log" >&2 || tail -n 30 "$log" >&2
    exit 1
  }
}

progress() {  # Every tenth step and every held-out loss, one line each; the last, on further batches, is the table's.
  awk -v run="$1" '
    match($0, /iteration +[0-9]+\/ +[0-9]+ /) {
      split(substr($0, RSTART, RLENGTH), part, /[\/ ]+/); step = part[2]; last = part[3]
      match($0, /lm loss: [0-9.E+-]+/); loss = substr($0, RSTART + 9, RLENGTH - 9)
      if (step % 10 == 0 || step == 1) { printf "  %-16s step %4d of %d   loss %.3f\n", run, step, last, loss; fflush() }
    }
    /validation loss at iteration [0-9]+( on validation set)? \|/ {
      end = /on validation set/ ? ", after training" : ""; match($0, /value: [0-9.E+-]+/)
      printf "  %-16s held-out loss %.3f%s\n", run, substr($0, RSTART + 7, RLENGTH - 7), end; fflush()
    }'
}

say "1 of 6: text to tokens"
megatron-moe tokenize --builtin-corpus "$OUT/corpus" --train-tokenizer --vocab-size 2048 --output "$OUT/data"

say "2 of 6: dense run, $DENSE_STEPS steps"
resume=(); [ -f "$OUT/dense/checkpoints/latest_checkpointed_iteration.txt" ] && resume=(--load "$OUT/dense/checkpoints")
train dense "$DENSE_STEPS" --moe-ext-group dense "${resume[@]}"

say "3 of 6: upcycle to 8 experts, top-2, and train $MOE_STEPS steps, expert parallel $RANKS"
if [ ! -d "$OUT/upcycled" ]; then
  megatron-moe upcycle "$OUT/dense/checkpoints" "$OUT/upcycled" --num-experts 8 --router-topk 2
fi
start=(--load "$OUT/upcycled")
[ -f "$OUT/moe/checkpoints/latest_checkpointed_iteration.txt" ] && start=(--load "$OUT/moe/checkpoints")
train moe "$MOE_STEPS" "${MOE_ARGS[@]}" --expert-model-parallel-size "$RANKS" --moe-ext-group moe "${start[@]}"

say "4 of 6: the dense run continued for the same tokens"
start=(--load "$OUT/dense/checkpoints")
[ -f "$OUT/dense-continued/checkpoints/latest_checkpointed_iteration.txt" ] && start=(--load "$OUT/dense-continued/checkpoints")
# Longer than its first start said, so the schedule comes from the flags, not from the checkpoint.
train dense-continued "$((DENSE_STEPS + MOE_STEPS))" --override-opt_param-scheduler --moe-ext-group dense "${start[@]}"

say "5 of 6: the same MoE from scratch, $MOE_STEPS steps"
start=(); [ -f "$OUT/moe-from-scratch/checkpoints/latest_checkpointed_iteration.txt" ] && start=(--load "$OUT/moe-from-scratch/checkpoints")
train moe-from-scratch "$MOE_STEPS" "${MOE_ARGS[@]}" --expert-model-parallel-size "$RANKS" --moe-ext-group moe "${start[@]}"

say "6 of 6: what happened"
megatron-moe report "$OUT/dense" "$OUT/moe" "$OUT/dense-continued" "$OUT/moe-from-scratch" -o "$OUT/report.html"
