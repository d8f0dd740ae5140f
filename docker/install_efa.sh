#!/usr/bin/env bash
# EFA's userspace and the OFI plugin, built against the NCCL of this image. The Dockerfile and build_enroot.sh run it.
# Usage: EFA_INSTALLER=VERSION OFI_NCCL=VERSION install_efa.sh          as root, inside the image
set -euo pipefail
: "${EFA_INSTALLER:?is read from upstream.toml}" "${OFI_NCCL:?is read from upstream.toml}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

curl --fail --silent --show-error --location --retry 3 --output efa.tar.gz \
  "https://efa-installer.amazonaws.com/aws-efa-installer-$EFA_INSTALLER.tar.gz"
tar -xf efa.tar.gz
# The kernel module is the host's; --skip-limit-conf because limits are the scheduler's.
(cd aws-efa-installer && ./efa_installer.sh -y -g --skip-kmod --skip-limit-conf --no-verify)

apt-get update
apt-get install -y --no-install-recommends libhwloc-dev
curl --fail --silent --show-error --location --retry 3 --output plugin.tar.gz \
  "https://github.com/aws/aws-ofi-nccl/releases/download/v$OFI_NCCL/aws-ofi-nccl-$OFI_NCCL.tar.gz"
mkdir plugin
tar -xf plugin.tar.gz -C plugin --strip-components=1
cd plugin
./configure --prefix=/opt/amazon/ofi-nccl --with-libfabric=/opt/amazon/efa --with-cuda=/usr/local/cuda \
  --enable-platform-aws --disable-tests
make -j"$(nproc)" install
rm -rf /var/lib/apt/lists/*

# NCCL_NET_PLUGIN=ofi makes NCCL look for exactly this name.
lib=/opt/amazon/ofi-nccl/lib
if [ ! -e "$lib/libnccl-net-ofi.so" ]; then ln -s libnccl-net.so "$lib/libnccl-net-ofi.so"; fi
# A library version that is missing shows here, not in a slow run.
missing=$(LD_LIBRARY_PATH="$lib:/opt/amazon/efa/lib:${LD_LIBRARY_PATH:-}" ldd "$lib/libnccl-net-ofi.so" \
  | grep -E "not found|EFA_" || true)
if [ -n "$missing" ]; then echo "error: the plugin does not load: $missing" >&2; exit 1; fi
