"""The random cases of `cases.py` over NCCL, one rank a GPU; started by torchrun. Prints how many were equal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import random_case, run_case_on


def main() -> int:
    """Run the cases on this rank's GPU."""
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    count = 60
    for seed in range(count):
        run_case_on(random_case(seed, world), rank, device)
    if rank == 0:
        print(f"{count} cases equal the dense reference over {world} GPU(s)")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
