"""The random cases of `cases.py` over NCCL, one rank a GPU; prints how many were equal.

    torchrun --standalone --nproc-per-node GPUS nccl_check.py [COUNT]
"""

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
    count = check(int(sys.argv[1]) if len(sys.argv) > 1 else 60, device)
    if dist.get_rank() == 0:
        print(f"{count} cases equal the dense reference over {dist.get_world_size()} GPU(s)")
    dist.destroy_process_group()
    return 0


def check(count: int, device: torch.device) -> int:
    """Run `count` cases over all ranks; return how many."""
    for seed in range(count):
        run_case_on(random_case(seed, dist.get_world_size()), dist.get_rank(), device)
    return count


if __name__ == "__main__":
    sys.exit(main())
