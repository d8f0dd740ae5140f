# Sourced on the GPU machine, with the folder into which pack.sh's archives were unpacked: `. DIR/repo/benchmarks/carry/env.sh DIR`.
# shellcheck shell=bash
cd "$1/repo" || return
export PYTHONPATH="$1/site:$1/repo/build/megatron:$1/repo" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=8
# NVLink multicast off: on shared hosts a program that uses it can put the GPUs out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export DATA="$1/data/manifest.json" UPSTREAM="$1/upstream"
# The blend names its files by the path where it was written.
sed -i "s,\"[^\"]*/\(train\|valid\|test\)/,\"$1/data/\1/," "$1/data/blend.json"
[ ! -d "$1/cublas" ] || export LD_PRELOAD="$1/cublas/libcublasLt.so.13:$1/cublas/libcublas.so.13"
