"""Claim: on one host a copy between GPUs is faster than NCCL's all-to-all, and takes less from a product beside it.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 python -m torch.distributed.run --standalone \\
        --nproc-per-node=2 benchmarks/exchange_copy.py [--tokens 24576] [--row-bytes 4144] [--out FILE]

Two GPUs send each other all tokens, as `dedup` does over two ranks: by `all_to_all_single`; and by a copy out of the
other's memory (torch's symmetric memory; a copy engine moves it, no kernel). Each alone, and beside a product of two
8,192 x 8,192 matrices: its kernel keeps all multiprocessors, so one that NCCL holds makes it wait. Medians of 20, us.
`--device cpu` times gloo's all-to-all alone: a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gated_run import machine
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.dispatch.bench import Clock

REPEATS = 20


def median_us(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call, after five to warm up; both ranks begin each together."""
    for _ in range(5):
        run()
    clock = Clock(dist.group.WORLD, device)
    for _ in range(REPEATS):
        clock.start()
        run()
        clock.lap()
    return statistics.median(clock.read()) * 1e3


def by_copy(own: Tensor, received: Tensor, exchange: Callable[[], object]) -> dict[str, float]:
    """Time the copy, and both ways beside a product. `own` and `received`: [bytes] uint8 on this rank's GPU."""
    import torch.distributed._symmetric_memory as symmetric

    device, rank = own.device, dist.get_rank()
    shared = symmetric.empty(own.numel(), dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(shared, dist.group.WORLD)
    theirs = handle.get_buffer(1 - rank, (own.numel(),), torch.uint8)
    shared.fill_(rank + 1)
    torch.cuda.synchronize()
    dist.barrier()
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def copy() -> None:
        handle.barrier()
        received.copy_(theirs)
        handle.barrier()

    def beside(work: Callable[[], object]) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.mm(matrix, matrix)
        torch.cuda.current_stream().wait_stream(side)

    found = {"copy": median_us(copy, device)}
    if not bool((received == 2 - rank).all()):
        raise RuntimeError(f"rank {rank}: the copy brought other bytes than the other rank wrote")
    found["product"] = median_us(lambda: torch.mm(matrix, matrix), device)
    found["product beside the all-to-all"] = median_us(lambda: beside(exchange), device)
    found["product beside the copy"] = median_us(lambda: beside(copy), device)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24576)
    parser.add_argument("--row-bytes", type=int, default=4144, help="2,048 values, 8 weights and numbers of experts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_world_size() != 2:
        raise SystemExit("exchange_copy.py: it is for two ranks: torchrun --nproc-per-node=2")
    own = torch.ones(args.tokens * args.row_bytes, dtype=torch.uint8, device=device)
    received = torch.empty_like(own)
    splits = [0, own.numel()] if rank == 0 else [own.numel(), 0]

    def exchange() -> None:
        dist.all_to_all_single(received, own, splits, splits)

    found = {"all-to-all": median_us(exchange, device)}
    if device.type == "cuda":
        found |= by_copy(own, received, exchange)
    if rank == 0:
        for name, us in found.items():
            rate = f"{own.numel() / us / 1e3:8.0f} GB/s" if name in ("all-to-all", "copy") else ""
            print(f"{name:<32}{us:>9.0f} us{rate}", flush=True)
        if args.out:
            record = {**machine(args.device), "bytes": own.numel(), "us": found}
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
