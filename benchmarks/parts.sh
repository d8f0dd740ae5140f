# Sourced by one_gpu.sh and two_gpus.sh, which set $parts (the parts asked for) and $work (a folder for logs).
# shellcheck shell=bash disable=SC2154

asked() { [[ " ${parts[*]} " == *" $1 "* ]]; }

# Runs a command with a limit; its output goes to a log of which the lines that match are printed, or the end if it failed.
part() { # NAME SECONDS PATTERN COMMAND...
  local name=$1 limit=$2 pattern=$3 begin=$SECONDS rc=0
  shift 3
  echo "== $name"
  timeout -k 10 "$limit" "$@" >"$work/$name.log" 2>&1 || rc=$?
  grep -E "$pattern" "$work/$name.log" || true
  [ "$rc" -eq 0 ] || tail -n 25 "$work/$name.log"
  echo "== $name: rc $rc, $((SECONDS - begin)) s"
}
