#!/usr/bin/env bash
# The first run on one GPU: the 8-layer slice of the handbook's MoE (64 experts of 1,024, top-8) under the hopper preset.
#
# Usage: first_run_1gpu.sh MANIFEST [OUT] [MEGATRON FLAGS...]
#   MANIFEST   manifest.json of `megatron-moe tokenize`;   OUT   run directory (default runs/first-run-1gpu)
#   STEPS      length of the run (default 120)
set -euo pipefail
# shellcheck source=examples/moe/lib.sh
. "$(dirname "$0")/lib.sh"
case ${1:-} in
  -h|--help) usage "$0" ;;
  "") die "MANIFEST is missing" "bash $0 --help" ;;
esac
manifest=$(realpath -m "$1")
if [ ! -r "$manifest" ]; then die "the data manifest $1 cannot be read" "check the path; megatron-moe tokenize writes it"; fi
cd "$(dirname "$0")/../.."
out=${2:-runs/first-run-1gpu}
data=$(dirname "$manifest")
STEPS=${STEPS:-120}
export PATH="$PWD/.venv/bin:$PATH"

MODEL_ARGS=(
  --num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32
  --group-query-attention --num-query-groups 4 --swiglu --disable-bias-linear --normalization RMSNorm
  --position-embedding-type rope --seq-length 4096 --max-position-embeddings 4096
  --attention-dropout 0 --hidden-dropout 0 --bf16
)
MOE_ARGS=(
  --num-experts 64 --moe-ffn-hidden-size 1024 --moe-router-topk 8 --moe-grouped-gemm
  --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
  --moe-router-dtype fp32 --moe-per-layer-logging
)
TRAIN_ARGS=(
  --micro-batch-size 8 --global-batch-size 32 --train-iters "$STEPS" --lr 5e-4 --min-lr 5e-5
  --lr-decay-style WSD --lr-decay-iters 10000 --lr-wsd-decay-iters 1000 --lr-warmup-iters 100
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --use-distributed-optimizer
  --eval-interval 100 --eval-iters 2 --log-interval 1 --log-throughput --moe-ext-preset hopper
)
DATA_ARGS=(
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$data/tokenizer"
  --per-split-data-args-path "$data/blend.json" --moe-ext-manifest "$manifest" --num-workers 1
)
exec torchrun --standalone --nproc-per-node 1 --no-python megatron-moe train --device cuda -- \
  "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${TRAIN_ARGS[@]}" "${DATA_ARGS[@]}" --moe-ext-run-dir "$out" "${@:3}"
