# shellcheck shell=bash disable=SC2034
# The flags of the first run (training handbook, sections 2.4 and 2.5): 16 layers, dense FFN of 8,192, or 64 experts of
# 1,024 with top-8; 1.22B active parameters either way. MOE_SCALE=toy is the same shape for two CPU cores. Sourced.
#   DATA_MANIFEST     manifest.json of `megatron-moe tokenize`
#   TRAIN_ITERS       length of the learning rate schedule;  STOP_AT  iteration to end at
#   EP                expert-parallel size (default: the ranks of one node)

case ${MOE_SCALE:-full} in
  full) LAYERS=16 HIDDEN=2048 FFN=8192 HEADS=32 GROUPS_KV=4 EXPERTS=64 EXPERT_FFN=1024 TOPK=8 SEQ=4096 MICRO=8 GLOBAL=512
        WARMUP=100 DECAY=1000 DEFAULT_ITERS=10000 DEFAULT_STOP=120 SAVE_EVERY=500 LOG_EVERY=1 VALIDATE_EVERY=100
        DEVICE=cuda ;;  # on a node whose driver is broken, auto would train this on the CPU
  toy)  LAYERS=2 HIDDEN=64 FFN=256 HEADS=4 GROUPS_KV=2 EXPERTS=4 EXPERT_FFN=128 TOPK=2 SEQ=64 MICRO=2 GLOBAL=8
        WARMUP=2 DECAY=4 DEFAULT_ITERS=20 DEFAULT_STOP=20 SAVE_EVERY=10 LOG_EVERY=1 VALIDATE_EVERY=10
        DEVICE=auto ;;
  *) die "MOE_SCALE=$MOE_SCALE is neither full nor toy" ;;
esac
MOE_DEVICE=${MOE_DEVICE:-$DEVICE}

recipe() {  # recipe dense|moe: fill the arrays
  need DATA_MANIFEST "manifest.json of the tokenized text (examples/moe/tokenize.sbatch writes it)"
  if [ "$DRY_RUN" = 0 ] && [ ! -r "$DATA_MANIFEST" ]; then
    die "the data manifest $DATA_MANIFEST cannot be read" "check the path; examples/moe/tokenize.sbatch writes it"
  fi
  MODEL_ARGS=(
    --num-layers "$LAYERS" --hidden-size "$HIDDEN" --ffn-hidden-size "$FFN" --num-attention-heads "$HEADS"
    --group-query-attention --num-query-groups "$GROUPS_KV" --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope
    --seq-length "$SEQ" --max-position-embeddings "$SEQ" --attention-dropout 0 --hidden-dropout 0
  )
  MOE_ARGS=()
  PARALLEL_ARGS=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --use-distributed-optimizer)
  SPEED_ARGS=()
  if [ "$1" = moe ]; then
    MOE_ARGS=(
      --num-experts "$EXPERTS" --moe-ffn-hidden-size "$EXPERT_FFN" --moe-router-topk "$TOPK"
      --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
      --moe-router-dtype fp32 --moe-per-layer-logging
    )
    PARALLEL_ARGS+=(--expert-model-parallel-size "${EP:-$GPUS_PER_NODE}" --expert-tensor-parallel-size 1)
  fi
  if [ "${MOE_SCALE:-full}" = full ]; then
    SPEED_ARGS=(
      --bf16 --overlap-grad-reduce --overlap-param-gather
      --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
      --cross-entropy-loss-fusion --cross-entropy-fusion-impl native
    )
    if [ "$1" = moe ]; then SPEED_ARGS+=(--moe-grouped-gemm --moe-permute-fusion); fi
  fi
  TRAIN_ARGS=(
    --micro-batch-size "$MICRO" --global-batch-size "$GLOBAL" --train-iters "${TRAIN_ITERS:-$DEFAULT_ITERS}"
    --lr 5e-4 --min-lr 5e-5 --lr-decay-style WSD --lr-warmup-iters "$WARMUP" --lr-wsd-decay-iters "$DECAY"
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234
    --exit-interval "${STOP_AT:-$DEFAULT_STOP}"
  )
  DATA_ARGS=(
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$(data_path tokenizer)"
    --per-split-data-args-path "$(dirname "$DATA_MANIFEST")/blend.json" --data-cache-path "$SHARED_ROOT/data-cache"
    --moe-ext-manifest "$DATA_MANIFEST" --num-workers 1
    --eval-interval "$VALIDATE_EVERY" --eval-iters 2
  )
  CHECKPOINT_ARGS=(
    --save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints" --save-interval "$SAVE_EVERY" --ckpt-format torch_dist
  )
  LOG_ARGS=(
    --log-interval "$LOG_EVERY" --log-throughput --log-params-norm --log-num-zeros-in-grad
    --moe-ext-run-dir "$RUN_DIR" --moe-ext-run-name "$NAME-$RUN_ID" --moe-ext-project "${MOE_PROJECT:-moe-first-run}"
  )
}

data_path() {  # The tokenizer's directory; under --dry-run the manifest need not exist yet
  if [ -r "$DATA_MANIFEST" ]; then manifest_value "$1" path; else echo "$(dirname "$DATA_MANIFEST")/$1"; fi
}

train_recipe() {  # train_recipe MORE FLAGS...: the arrays, then what the script adds
  train "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${SPEED_ARGS[@]}" "${TRAIN_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${LOG_ARGS[@]}" "$@"
}
