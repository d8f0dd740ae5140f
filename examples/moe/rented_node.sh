#!/usr/bin/env bash
# One rented node on Hugging Face Jobs: the preflight, then the first run in the same job.
# Usage: rented_node.sh dense|moe [--dry-run]      needs the `hf` command, logged in; untested: docs/cluster-rented-node.md
#   IMAGE         image of docker/Dockerfile in a registry that Jobs reads (required)
#   DATA_VOLUME   tokens, e.g. hf://datasets/ME/tokens:/data; manifest.json lies at its top (required)
#   RUNS_VOLUME   a bucket for the run, e.g. hf://buckets/ME/runs:/runs: the node's own disk goes with the job (required)
#   RUN_NAME      directory in it (default: the model); give the same one to go on after a time limit
#   FLAVOR        default h200x8; the number after the x is the ranks of the node
#   TIMEOUT       default 4h; training is told to save and end ten minutes before
set -euo pipefail
die() { echo "error: $1" >&2; echo "try:   $2" >&2; exit 64; }
DRY_RUN=0 MODEL=""
for word in "$@"; do
  case $word in
    --dry-run) DRY_RUN=1 ;;
    dense|moe) MODEL=$word ;;
    -h|--help) sed -n '2,9{s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) die "there is no option $word" "$0 --help" ;;
  esac
done
if [ -z "$MODEL" ]; then die "which model: dense or moe?" "$0 moe"; fi
for name in IMAGE DATA_VOLUME RUNS_VOLUME; do
  if [ -z "${!name:-}" ]; then die "$name is not set" "export $name=... ($0 --help says what it is)"; fi
done
FLAVOR=${FLAVOR:-h200x8} TIMEOUT=${TIMEOUT:-4h} RUN_NAME=${RUN_NAME:-$MODEL}
GPUS=${FLAVOR##*x}
case $GPUS in ""|*[!0-9]*) GPUS=1 ;; esac
case $TIMEOUT in
  *h) SECONDS_LEFT=$((${TIMEOUT%h} * 3600)) ;;
  *m) SECONDS_LEFT=$((${TIMEOUT%m} * 60)) ;;
  *) die "TIMEOUT=$TIMEOUT is neither hours nor minutes" "TIMEOUT=4h" ;;
esac
if [ "$SECONDS_LEFT" -le 1200 ]; then die "TIMEOUT=$TIMEOUT leaves no time to train" "TIMEOUT=1h or more"; fi
mount_of() { local rest=${1#hf://}; rest=${rest#*:}; echo "${rest%%:*}"; }
DATA=$(mount_of "$DATA_VOLUME") RUNS=$(mount_of "$RUNS_VOLUME")

# The image asks for EFA, which such a node lacks. `timeout` sends what first_run.sbatch takes for the end of its time; the
# job's own SECONDS count the preflight in. A preflight that could not tell (2: no baseline) does not keep one node back.
# shellcheck disable=SC2016
SCRIPT='set -e; cd /opt/moe
bash examples/moe/preflight.sbatch || [ $? = 2 ]
exec timeout --signal=TERM --kill-after=600 $(('"$((SECONDS_LEFT - 600))"' - SECONDS)) bash examples/moe/first_run.sbatch '"$MODEL"
ENVIRON=(EFA=0 NCCL_NET= NCCL_NET_PLUGIN= FI_PROVIDER= "GPUS_PER_NODE=$GPUS" "SHARED_ROOT=$RUNS"
  "RUN_DIR=$RUNS/$RUN_NAME" "DATA_MANIFEST=$DATA/manifest.json")
COMMAND=(hf jobs run --flavor "$FLAVOR" --timeout "$TIMEOUT" --volume "$DATA_VOLUME" --volume "$RUNS_VOLUME")
for pair in "${ENVIRON[@]}"; do COMMAND+=(--env "$pair"); done
COMMAND+=("$IMAGE" bash -c "$SCRIPT")
if [ "$DRY_RUN" = 1 ]; then printf '%q ' "${COMMAND[@]}"; echo; exit 0; fi
exec "${COMMAND[@]}"
