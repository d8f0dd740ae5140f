#!/usr/bin/env bash
# The CPU image without a Docker engine or a registry: Debian's debootstrap makes the base, buildah runs Dockerfile.cpu.
# Usage: build_cpu.sh [--dry-run]      as root on Debian or Ubuntu: apt-get install buildah debootstrap
#   STORE=DIR         where buildah keeps images (default build/images; its own, so that `rm -rf` is all the clean-up)
#   IMAGE=NAME        (default localhost/megatron-moe-cpu)
#   BUILD_VOLUMES     mounts for the build only, e.g. "$HOME/.cache/uv:/root/.cache/uv" or your CA certificates
# Run what it built: buildah --root STORE/root --runroot STORE/run from IMAGE, then `buildah run`.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
dry=0
case ${1:-} in
  "") ;;
  --dry-run) dry=1 ;;
  *) sed -n '3,7p' "$0" >&2; exit 64 ;;
esac
STORE=${STORE:-$repo/build/images}
IMAGE=${IMAGE:-localhost/megatron-moe-cpu}
die() { echo "error: $1" >&2; echo "try:   $2" >&2; exit 64; }
run() { if [ "$dry" = 1 ]; then printf '%q ' "$@"; echo; else "$@"; fi; }
for tool in buildah debootstrap; do
  if [ "$dry" = 0 ] && ! command -v "$tool" >/dev/null; then die "$tool is not installed" "apt-get install $tool"; fi
done
if [ "$dry" = 0 ] && [ "$(id -u)" != 0 ]; then die "debootstrap needs root" "sudo $0"; fi

suite=$(python3 "$repo/docker/build_args.py" env | sed -n 's/^CPU_SUITE=//p')
base=localhost/moe-base-$suite
# Native overlays share what vfs copies whole for every layer.
driver=vfs
if grep -qw overlay /proc/filesystems; then driver=overlay; fi
driver=${STORAGE_DRIVER:-$driver}
# With overlays a build that failed goes on from its last finished step; vfs would pay for that with a copy a step.
layers=()
if [ "$driver" = overlay ]; then layers=(--layers); fi
tool=(buildah --root "$STORE/root" --runroot "$STORE/run" --storage-driver "$driver")
if [ "$dry" = 0 ]; then mkdir -p "$STORE"; fi

if [ "$dry" = 1 ] || ! "${tool[@]}" inspect --type image "$base" >/dev/null 2>&1; then
  tree=$STORE/base-$suite
  trap 'rm -rf "$tree"' EXIT
  if [ "$dry" = 0 ]; then rm -rf "$tree"; fi
  # Python 3.12 or newer with its headers, which Megatron's dataset helper is compiled against.
  run debootstrap --variant=minbase --include=ca-certificates,python3,python3-dev,python3-venv "$suite" "$tree"
  if [ "$dry" = 0 ]; then rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/*; fi
  if [ "$dry" = 0 ]; then name=$("${tool[@]}" from scratch); else name=NAME; fi
  run "${tool[@]}" add --quiet "$name" "$tree" /
  run "${tool[@]}" config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --env LANG=C.UTF-8 "$name"
  run "${tool[@]}" commit --rm "$name" "$base"
fi
mapfile -t words < <(python3 "$repo/docker/build_args.py" docker | tr ' ' '\n')
volumes=()
for volume in ${BUILD_VOLUMES:-}; do volumes+=(--volume "$volume"); done
# The last value of an argument counts: this base instead of the registry's.
run "${tool[@]}" build --isolation chroot --pull=never "${layers[@]}" "${words[@]}" --build-arg "CPU_BASE=$base" "${volumes[@]}" \
  --format docker -f "$repo/docker/Dockerfile.cpu" -t "$IMAGE" "$repo"
