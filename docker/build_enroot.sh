#!/usr/bin/env bash
# The training image for Enroot and Pyxis, without Docker: import the base, add the layers in a writable container, export.
# Usage: build_enroot.sh OUTPUT.sqsh [--dry-run]      on a compute node with Enroot; the checkout must be readable there
# Started again after a failure it goes on from the last finished step; the container is removed when it ends well.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
output=${1:-}
case $output in
  *.sqsh) ;;
  *) sed -n '3,4p' "$0" >&2; exit 64 ;;
esac
dry=${2:-}
if [ -e "$output" ]; then echo "error: $output exists" >&2; echo "try:   name a new file: images are kept with the figures measured in them" >&2; exit 64; fi
run() { if [ "$dry" = --dry-run ]; then printf '%q ' "$@"; echo; else "$@"; fi; }

values=$(python3 "$repo/docker/build_args.py" env)
value() { sed -n "s/^$1=//p" <<< "$values"; }
base=$(value BASE)
state=$output.state
name=moe-build-$(basename "$output" .sqsh)
passed=()
for key in EFA_INSTALLER OFI_NCCL DEEPEP GROUPED_GEMM TRACKIO; do passed+=(--env "$key=$(value "$key")"); done

step() {  # step NAME COMMAND...: once; a finished one leaves a marker
  local mark=$state/$1; shift
  if [ -e "$mark" ]; then return 0; fi
  run "$@"
  if [ "$dry" != --dry-run ]; then touch "$mark"; fi
}
clean() {  # A half-made export must not look like an image; markers stay, so that the next start goes on.
  local status=$?
  if [ "$status" != 0 ]; then rm -f "$output.part"; echo "error: stopped; start the same command again to go on" >&2; fi
  exit "$status"
}
trap clean EXIT
if [ "$dry" != --dry-run ]; then mkdir -p "$state"; fi

# Enroot writes the registry's host before a #.
step import enroot import -o "$output.base" "docker://${base/\//#}"
step create enroot create --force --name "$name" "$output.base"
in_container() { enroot start --root --rw --mount "$repo:/mnt/moe" "${passed[@]}" "$name" "$@"; }
if [ "$dry" = --dry-run ]; then in_container() { printf 'enroot start %q ' "$name"; printf '%q ' "$@"; echo; }; fi
# shellcheck disable=SC2310
inside() { in_container "$@"; }
for part in copy efa fork; do
  if [ -e "$state/$part" ]; then continue; fi
  case $part in
    copy) inside bash -c 'mkdir -p /opt/moe && tar -C /mnt/moe --exclude=.git --exclude=.venv --exclude=build -cf - . | tar -C /opt/moe -xf -' ;;
    efa) inside bash /opt/moe/docker/install_efa.sh ;;
    fork) inside bash /opt/moe/docker/install_fork.sh train ;;
  esac
  if [ "$dry" != --dry-run ]; then touch "$state/$part"; fi
done
step export enroot export --output "$output.part" "$name"
run mv "$output.part" "$output"
run enroot remove --force "$name"
run rm -rf "$state" "$output.base"
echo "export TRAIN_IMAGE=$output"
