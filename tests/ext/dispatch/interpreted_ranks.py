"""Random cases of whole dispatches on gloo ranks with every kernel interpreted, against a dense mixture of experts.

    TRITON_INTERPRET=1 MOE_EXT_DISPATCH_KERNELS=interpret python interpreted_ranks.py RANKS CASES

Prints how many cases were equal. What runs is the path of a GPU, but for streams and NCCL. bf16 is left out: the
interpreter truncates where a GPU rounds.
"""

from __future__ import annotations

import sys

import torch
from cases import run_cases
from gloo_world import run_ranks


def main() -> None:
    """Run the cases."""
    ranks, cases = map(int, sys.argv[1:])
    done = run_ranks(run_cases, ranks, ranks, list(range(cases)), {"dtype": torch.float32})
    print(f"{done[0]} cases equal dense on {ranks} ranks")


if __name__ == "__main__":
    main()
