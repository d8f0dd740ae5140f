"""Claim: how unevenly a learned router would load ranks falls as it learns, but early steps show the worst of it.

    python benchmarks/rank_balance.py RUN [--ranks 2 4 8] [--placed-at STEP ...] [--json FILE]

RUN: a run directory with routing.jsonl (any number of ranks: the counts are over all of them). For each sampled step
and number of ranks: rows of the fullest rank over the mean, less 1, were the experts laid over so many ranks in blocks
as Megatron lays them; the mean over the layers, the worst layer, and all layers together. With an all-to-all in each
layer the others wait for the fullest rank there, so the mean is what the experts' time grows by. Memory holds the rows
of all layers at once, and a rank that is full in one has fewer in another: the largest excess of all layers together,
plus 1, is what `plan memory --rank-load` asks for. With --placed-at, below: the means of the samples behind STEP as
they were, and had `megatron-moe place` numbered the experts anew at STEP by the five samples before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.errors import UserError
from megatron_ext.place import balance
from megatron_ext.tracking.rundir import RoutingFrame, read_run


def placed(frames: Sequence[RoutingFrame], ranks: int, step: int) -> tuple[list[float], list[float]]:
    """Return the mean over the layers at each sample behind `step`, as it was and had the experts been placed then."""
    counted = np.sum([frame.counts for frame in frames if frame.step <= step][-balance.FRAMES:], axis=0)
    order = np.stack([balance.even_order(of, ranks) for of in counted])
    later = [frame.counts for frame in frames if frame.step > step]
    moved = [np.take_along_axis(counts, order, -1) for counts in later]
    return ([float(balance.excess(of, ranks).mean()) for of in later],
            [float(balance.excess(of, ranks).mean()) for of in moved])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--placed-at", type=int, nargs="+", default=[], metavar="STEP")
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
        by_layer = {ranks: balance.excess(frame.counts, ranks) for ranks in args.ranks}
        whole = {ranks: float(balance.excess(frame.counts.sum(0), ranks)) for ranks in args.ranks}
        cells = (f"{of.mean():.1%} ({of.max():.1%}), {whole[ranks]:.1%}" for ranks, of in by_layer.items())
        table.add_row(str(frame.step), *cells)
        together.append({"step": frame.step, **{str(ranks): round(of, 4) for ranks, of in whole.items()}})
        rounded = {str(ranks): np.round(of, 4).tolist() for ranks, of in by_layer.items()}
        rows.append({"step": frame.step, **rounded})
    Console().print(table)
    record: dict[str, Any] = {"experts": experts, "excess by ranks and layer": rows, "of all layers together": together}
    for step in args.placed_at:
        if not frames[0].step <= step < frames[-1].step:
            raise SystemExit(f"rank_balance.py: the samples go from step {frames[0].step} to {frames[-1].step}")
        at = record.setdefault("placed at", {}).setdefault(str(step), {})
        for ranks in args.ranks:
            before, after = placed(frames, ranks, step)
            means = f"{np.mean(before):.1%} on average, placed {np.mean(after):.1%}"
            print(f"{ranks} ranks, {len(before)} samples behind step {step}: {means}")
            found = {"as it was": before, "placed": after}
            at[str(ranks)] = {name: np.round(of, 4).tolist() for name, of in found.items()}
    if args.json:
        args.json.write_text(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
