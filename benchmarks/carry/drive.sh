#!/usr/bin/env bash
# Runs what a lent machine of two GPUs has time for, in one go, without anybody watching: each GPU a lane of its own, then
# both together. For a session whose minutes count: the machine is never idle, and whatever ends early leaves its files.
#   . DIR/repo/benchmarks/carry/env.sh DIR; setsid nohup bash benchmarks/carry/drive.sh OUT >OUT.txt 2>&1 &
# Look at it with `bash benchmarks/carry/drive.sh OUT show`, fetch OUT whenever a command of yours ends.
# Environment: DATA and UPSTREAM (env.sh sets them), LANES_SECONDS (the lanes are ended after so many; 330), MODEL_SECONDS
# (no further run of the whole model starts after so many; 190), LANE0 and LANE1 (parts of one_gpu.sh and `tests`,
# `kernels`, `passes` below), BOTH (parts of two_gpus.sh), PYTHON.
set -uo pipefail
out=${1:?usage: drive.sh OUT [show]}
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
if [ "${2:-}" = show ]; then
  for file in "$out"/*.txt; do
    echo "--- $(basename "$file")"
    grep -E 'TFLOP|failed|passed|Error|MiB|^== |/ |ms|%|values|done' "$file" | cut -c1-170 | tail -n 14
  done
  exit 0
fi
mkdir -p "$out"
begin=$(date +%s)
since() { echo $(($(date +%s) - begin)); }

passes() { # kernels against copies, on a GPU that does nothing else
  timeout 60 "$python" "$here/fused_adam.py" --out "$out/fused_adam.json"
  timeout 60 "$python" "$here/router_gradient.py" --out "$out/router_gradient.json"
  timeout 60 "$python" "$here/fused_swiglu.py" --out "$out/fused_swiglu.json"
  timeout 60 "$python" "$here/grouped_products.py" --json "$out/grouped_products.json"
}

kernels() { # the tests of the kernels alone, before anything relies on them
  PYTHON=$python timeout 150 bash "$here/../tests/gpu/run.sh" \
    "$here/../tests/gpu/test_dispatch_kernels.py" "$here/../tests/gpu/test_fused_pieces.py"
}

lane() { # GPU PART ...
  export CUDA_VISIBLE_DEVICES=$1
  shift
  for part in "$@"; do
    case $part in
      passes | kernels) "$part" >"$out/$part.txt" 2>&1 ;;
      *) bash "$here/one_gpu.sh" "$out/$part" "$part" >"$out/$part.txt" 2>&1 ;;
    esac
    echo "$part done at $(since) s"
  done
}

read -ra first <<<"${LANE0:-step profile}"
read -ra second <<<"${LANE1:-kernels tests}"
export -f lane passes kernels since
export out here python begin
# Sessions of their own, so that what a lane started ends with it.
setsid bash -c 'lane 0 "$@"' lane "${first[@]}" &
lanes=("$!")
setsid nice -n 10 bash -c 'lane 1 "$@"' lane "${second[@]}" &
lanes+=("$!")
while kill -0 "${lanes[0]}" 2>/dev/null || kill -0 "${lanes[1]}" 2>/dev/null; do
  [ "$(since)" -lt "${LANES_SECONDS:-330}" ] || break
  sleep 1
done
for leader in "${lanes[@]}"; do
  pkill -KILL -s "$leader" 2>/dev/null
done
# Gated trainings lead sessions of their own.
pkill -KILL -f 'gated_start\.py' 2>/dev/null
echo "both GPUs from $(since) s"
read -ra both <<<"${BOTH:-model trace}"
MODEL_SECONDS=${MODEL_SECONDS:-190} bash "$here/two_gpus.sh" "$out/both" "${both[@]}" >"$out/both.txt" 2>&1
echo "all done at $(since) s"
