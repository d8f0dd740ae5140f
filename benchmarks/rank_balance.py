"""Claim: how unevenly a learned router would load ranks falls as it learns, but early steps show the worst of it.

    python benchmarks/rank_balance.py RUN [--ranks 2 4 8] [--json FILE]

RUN: a run directory with routing.jsonl (any number of ranks: the counts are over all of them). For each sampled step
and number of ranks: rows of the fullest rank over the mean, less 1, were the experts laid over so many ranks in blocks
as Megatron lays them; the mean over the layers, the worst layer, and all layers together. With an all-to-all in each
layer the others wait for the fullest rank there, so the mean is what the experts' time grows by. Memory holds the rows
of all layers at once, and a rank that is full in one has fewer in another: the largest excess of all layers together,
plus 1, is what `plan memory --rank-load` asks for.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.errors import UserError
from megatron_ext.tracking.rundir import RoutingFrame, read_run


def excess(frame: RoutingFrame, ranks: int) -> np.ndarray:
    """Return the fullest rank's rows over the mean, less 1, of each layer: float64 [L]."""
    by_rank = frame.counts.reshape(len(frame.layers), ranks, -1).sum(-1)
    return np.asarray(by_rank.max(-1) / by_rank.mean(-1) - 1)


def excess_together(frame: RoutingFrame, ranks: int) -> float:
    """Return the same for the rows of all layers together."""
    by_rank = frame.counts.reshape(len(frame.layers), ranks, -1).sum((0, 2))
    return float(by_rank.max() / by_rank.mean() - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        frames = read_run(args.run).routing
    except UserError as error:
        raise SystemExit(f"rank_balance.py: {error}") from None
    if not frames:
        raise SystemExit(f"rank_balance.py: {args.run} has no routing: train with --moe-ext-run-dir")
    experts = frames[0].counts.shape[1]
    if unfit := [ranks for ranks in args.ranks if ranks < 1 or experts % ranks]:
        raise SystemExit(f"rank_balance.py: {experts} experts cannot lie evenly over {unfit[0]} ranks")
    table = Table("step", *(f"{ranks} ranks: mean (worst layer), together" for ranks in args.ranks))
    rows = []
    together = []
    for frame in frames:
        found = {ranks: excess(frame, ranks) for ranks in args.ranks}
        whole = {ranks: excess_together(frame, ranks) for ranks in args.ranks}
        table.add_row(
            str(frame.step), *(f"{of.mean():.1%} ({of.max():.1%}), {whole[ranks]:.1%}" for ranks, of in found.items())
        )
        together.append({"step": frame.step, **{str(ranks): round(of, 4) for ranks, of in whole.items()}})
        rows.append({"step": frame.step, **{str(ranks): np.round(of, 4).tolist() for ranks, of in found.items()}})
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({
            "experts": experts, "excess by ranks and layer": rows, "of all layers together": together,
        }) + "\n")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
