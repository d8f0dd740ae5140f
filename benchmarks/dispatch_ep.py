"""Claim: dispatch plus combine of `dedup` and `twohop` take at most half of `alltoall`'s time at 32k tokens a rank.

    torchrun --standalone --nproc-per-node 2 benchmarks/dispatch_ep.py --out ep2.json
    torchrun --standalone --nproc-per-node 4 benchmarks/dispatch_ep.py --ranks-per-node 2 --out ep4.json
    python benchmarks/dispatch_ep.py --show ep2.json       # the ratios, one line a shape

On two GPUs only `dedup` differs from `alltoall`; four emulate two nodes of two for `twohop`. The same as
`megatron-moe bench dispatch`; needs only torch, triton and numpy, and times Megatron's own dispatcher too when it is on
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.dispatch import bench_cli


def show(path: Path) -> None:
    """Print, for each shape, `alltoall`'s ms for dispatch plus combine, both ways, and the others' speed-ups."""
    rows = json.loads(path.read_text())["rows"]
    for skewed in (False, True):
        for tokens in sorted({row["shape"]["tokens"] for row in rows}):
            here = [r for r in rows if (r["shape"]["tokens"], r["shape"]["skewed"]) == (tokens, skewed)]
            base, *others = here
            ratios = "  ".join(f"{r['name']} {base['total_ms'] / r['total_ms']:.2f}x" for r in others)
            gap = max(r["largest_gap"] for r in here)
            print(f"{tokens:>6} {'skewed' if skewed else 'even  '} {base['name']} {base['total_ms']:.2f} ms  {ratios}"
                  f"  largest gap {gap:.1e}")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--show"]:
        show(Path(sys.argv[2]))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__)
    bench_cli.add_arguments(parser)
    sys.exit(bench_cli.run(parser.parse_args(["dispatch", *sys.argv[1:]])))
