# shellcheck shell=bash
# Common part of the launch scripts: where they run (Slurm or not, container or not), how training is started, and what
# happens on a signal. Sourced, never run. The flags of a training live in recipe.sh.
#
# Variables that you may export:
#   SHARED_ROOT       directory that all nodes see (default: the checkout)
#   RUN_DIR           one directory a run; give the same one to go on with it (default: SHARED_ROOT/runs/NAME-JOBID)
#   TRAIN_IMAGE       container image for Pyxis; empty runs the checkout's own .venv, else what is on PATH
#   GPUS_PER_NODE     ranks a node (default 8)
#   MOE_DEVICE        auto, cuda or cpu (default cuda: no GPU is an error; auto for MOE_SCALE=toy and the preflight)
#   MAX_RESTARTS      how often a stopped job is requeued (default 20)

LIB_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# sbatch runs a copy of the script from its spool, so the checkout is where the job was submitted from.
REPO=${MOE_REPO:-$(cd "$LIB_DIR/../.." && pwd)}
DRY_RUN=0
STOPPED=0
CHILD=""

die() { echo "error: $1" >&2; if [ -n "${2:-}" ]; then echo "try:   $2" >&2; fi; exit 64; }

usage() {  # The comment at the top of the script is its help.
  sed -n '2,/^[^#]/{/^#SBATCH/d;s/^# \{0,1\}//p}' "$1"
  exit "${2:-0}"
}

need() {  # need NAME WHY: an exported variable without which the script cannot do its work
  if [ -z "${!1:-}" ]; then die "$1 is not set: $2" "export $1=..."; fi
}

setup() {  # setup SCRIPT NAME ARGUMENTS...: reads the common options; what is left is in REST
  local script=$1; NAME=$2; shift 2
  REST=()
  while [ $# -gt 0 ]; do
    case $1 in
      --dry-run) DRY_RUN=1 ;;
      -h|--help) usage "$script" ;;
      *) REST+=("$1") ;;
    esac
    shift
  done
  SHARED_ROOT=${SHARED_ROOT:-$REPO}
  RUN_ID=${SLURM_JOB_ID:-$(date +%Y%m%d-%H%M%S)}
  RUN_DIR=${RUN_DIR:-$SHARED_ROOT/runs/$NAME-$RUN_ID}
  NNODES=${SLURM_JOB_NUM_NODES:-1}
  GPUS_PER_NODE=${GPUS_PER_NODE:-8}
  MOE_DEVICE=${MOE_DEVICE:-}
  if [ -z "${TRAIN_IMAGE:-}" ]; then
    export PATH="$REPO/.venv/bin:$PATH"
    if [ "$DRY_RUN" = 0 ] && ! command -v megatron-moe >/dev/null; then
      die "megatron-moe is neither in $REPO/.venv nor on PATH" \
        "make setup, or activate the environment that has it, or export TRAIN_IMAGE"
    fi
  fi
  export CUDA_DEVICE_MAX_CONNECTIONS=1
}

on_nodes() {  # on_nodes TASKS_PER_NODE COMMAND...: run it on every node of the job, or here without Slurm
  local tasks=$1; shift
  local command=()
  if [ -n "${SLURM_JOB_ID:-}" ]; then
    command+=(srun "--nodes=$NNODES" "--ntasks=$((tasks * NNODES))" "--ntasks-per-node=$tasks" --kill-on-bad-exit=1)
    if [ -n "${TRAIN_IMAGE:-}" ]; then
      command+=("--container-image=$TRAIN_IMAGE" "--container-mounts=$SHARED_ROOT:$SHARED_ROOT" --no-container-mount-home)
    fi
  fi
  run "${command[@]}" "$@"
}

run() {  # Print under --dry-run, else run; the exact command, quoted so that it can be pasted
  if [ "$DRY_RUN" = 1 ]; then printf '%q ' "$@"; echo; return 0; fi
  "$@"
}

train() {  # train FLAGS...: Megatron on every node; on a signal it saves, ends, and the job is requeued
  local torchrun=(torchrun "--nproc-per-node=$GPUS_PER_NODE")
  if [ "$NNODES" -gt 1 ]; then
    local head=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)}
    torchrun+=("--nnodes=$NNODES" --rdzv-backend=c10d "--rdzv-id=$RUN_ID" "--rdzv-endpoint=$head:${MASTER_PORT:-29500}")
  else
    torchrun+=(--standalone)
  fi
  # torchrun would die of the signal that tells the ranks to save, and on SIGTERM it leaves them 30 s only: it and its
  # shell ignore SIGUSR1, the ranks handle it (--exit-signal).
  # shellcheck disable=SC2016
  local shield=(bash -c 'trap "" USR1; exec "$@"' shield)
  local command=("${torchrun[@]}" --no-python megatron-moe train --device "$MOE_DEVICE" --
    "$@" --exit-signal-handler --exit-signal SIGUSR1)
  if [ "$DRY_RUN" = 1 ]; then on_nodes 1 "${shield[@]}" "${command[@]}"; return 0; fi
  mkdir -p "$RUN_DIR"
  trap stop USR1 TERM INT
  on_nodes 1 "${shield[@]}" "${command[@]}" &
  CHILD=$!
  local status=0
  # A trap ends `wait` early; the training is over only when the process is gone.
  while kill -0 "$CHILD" 2>/dev/null; do status=0; wait "$CHILD" || status=$?; done
  trap - USR1 TERM INT
  if [ "$STOPPED" = 1 ]; then requeue; fi
  return "$status"
}

stop() {  # Tell every rank to save and end; called once, by a signal to this script
  if [ "$STOPPED" = 1 ]; then return 0; fi
  STOPPED=1
  echo "[launch] signal: the ranks save a checkpoint and end" >&2
  if [ -n "${SLURM_JOB_ID:-}" ]; then
    scancel --signal=USR1 "$SLURM_JOB_ID"   # All steps, not this shell
  else
    local ranks
    mapfile -t ranks < <(descendants "$CHILD")
    if [ ${#ranks[@]} -gt 0 ]; then kill -USR1 "${ranks[@]}" 2>/dev/null || true; fi
  fi
}

descendants() {
  local child
  for child in $(pgrep -P "$1" || true); do echo "$child"; descendants "$child"; done
}

requeue() {  # The same job id and so the same RUN_DIR: training goes on from its last checkpoint
  if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "[launch] stopped; go on with: RUN_DIR=$RUN_DIR bash $0 ${REST[*]:-}" >&2
    exit 75
  fi
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "${MAX_RESTARTS:-20}" ]; then
    die "stopped for the ${SLURM_RESTART_COUNT}th time and MAX_RESTARTS=${MAX_RESTARTS:-20}" "scontrol requeue $SLURM_JOB_ID"
  fi
  echo "[launch] requeue $SLURM_JOB_ID" >&2
  scontrol requeue "$SLURM_JOB_ID"
  # Slurm ends this shell; going on would start the next step of the script with half a training.
  sleep 60
  exit 75
}

efa() {  # What NCCL needs on EFA (docs/cluster-slurm-efa.md). Does nothing where EFA=0 or there is no EFA.
  if [ "${EFA:-auto}" = 0 ] || { [ "${EFA:-auto}" = auto ] && [ ! -d /opt/amazon/efa ] && [ -z "${TRAIN_IMAGE:-}" ]; }; then
    return 0
  fi
  export FI_PROVIDER=efa FI_EFA_USE_DEVICE_RDMA=1
  export NCCL_NET_PLUGIN=ofi NCCL_NET=Libfabric   # NCCL_NET makes a missing plugin an error, not a slow run
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-'^lo,docker0,veth_def_agent'}
  export NCCL_DEBUG=${NCCL_DEBUG:-INFO}
}

manifest_value() {  # manifest_value KEY...: one value out of $DATA_MANIFEST
  python3 - "$DATA_MANIFEST" "$@" <<'PY'
import json, pathlib, sys
file = pathlib.Path(sys.argv[1])
value = json.loads(file.read_text())
for key in sys.argv[2:]:
    value = value[key]
print(file.parent / value if sys.argv[-1] == "path" else value)
PY
}
