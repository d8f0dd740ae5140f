"""Claim: dispatch plus combine of `dedup` and `twohop` take at most half of `alltoall`'s time at 32k tokens a rank.

    torchrun --standalone --nproc-per-node 2 benchmarks/dispatch_ep.py --out ep2.json
    torchrun --standalone --nproc-per-node 4 benchmarks/dispatch_ep.py --ranks-per-node 2 --out ep4.json

On two GPUs only `dedup` differs from `alltoall`; four emulate two nodes of two for `twohop`. The same as
`megatron-moe bench dispatch`; needs only torch, triton and numpy, and times Megatron's own dispatcher too when it is on
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.dispatch import bench_cli

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    bench_cli.add_arguments(parser)
    sys.exit(bench_cli.run(parser.parse_args(["dispatch", *sys.argv[1:]])))
