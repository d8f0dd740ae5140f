"""`megatron-moe place SOURCE TARGET --run RUN`: the checkpoint, with its experts laid evenly over the ranks."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from megatron_ext import screen
from megatron_ext.errors import UserError
from megatron_ext.place import balance
from megatron_ext.usage import whole

if TYPE_CHECKING:
    from megatron_ext.place.renumber import Experts
    from megatron_ext.tracking.rundir import RoutingFrame
    from megatron_ext.upcycle.source import Source

USAGE = """\
Every layer waits for the rank whose experts got most tokens. This numbers the experts of each layer anew, so that the
ranks get about as many, by what the run's monitor counted; the model is the same function. Then train on with
--load TARGET and the same flags: iteration, data, schedule and optimizer go on.

  megatron-moe place runs/moe/checkpoints runs/placed/checkpoints --run runs/moe --ranks 8

The optimizer's state must be stored by weight (--dist-ckpt-optim-fully-reshardable). It pays where experts lie over
four ranks or more and their loads have settled: `--dry-run` says what there is to win.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = USAGE
    parser.add_argument("source", type=Path, help="folder that the run saved to: torch_dist")
    parser.add_argument("target", type=Path, help="new folder for the checkpoint")
    parser.add_argument("--run", type=Path, required=True, help="the run's directory (its --moe-ext-run-dir)")
    parser.add_argument("--ranks", type=whole(), metavar="R",
                        help="expert-parallel size of the run to come (default: as the checkpoint's)")
    parser.add_argument("--frames", type=whole(), default=balance.FRAMES, metavar="N",
                        help=f"sum the counts of the last N samples up to the checkpoint (default {balance.FRAMES})")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer's state out")
    parser.add_argument("--dry-run", action="store_true", help="say what it would do; write nothing")
    parser.add_argument("--json", action="store_true", help="print the result for programs")


def run(args: Namespace) -> int:
    """Write the checkpoint; return 0.

    Raises:
        UserError: The checkpoint or the run does not have what it takes.
    """
    from megatron_ext.place import renumber
    from megatron_ext.upcycle.source import TRACKER, open_source
    from megatron_ext.upcycle.write import write

    source = open_source(args.source)
    experts = renumber.experts_of(source)
    ranks = args.ranks or experts.ranks
    _check_ranks(ranks, experts.number)
    frames = _frames(args.run, source, args.frames, experts)
    orders = _orders(frames, ranks)
    note = _note(source, args.run, ranks, frames, orders)
    content = renumber.plan_content(source, orders, note, weights_only=args.weights_only)
    tracker = (source.root / TRACKER).read_text().strip()
    return write(args, content, folder=source.folder.name, tracker=tracker, note=note, tell=lambda: _explain(note))


def _check_ranks(ranks: int, experts: int) -> None:
    if ranks < 2 or experts % ranks:
        why = "one rank has all experts anyway" if ranks == 1 else f"{experts} experts do not divide among them"
        raise UserError("experts cannot be laid over so many ranks", where=f"{ranks} ranks", why=why,
                        remedy="give the expert-parallel size of the run to come with --ranks", exit_code=64)


def _frames(run: Path, source: Source, number: int, experts: Experts) -> Sequence[RoutingFrame]:
    """Return the last samples up to the checkpoint, decoder layers only, all of one start: a start may have placed."""
    from megatron_ext.tracking.rundir import read_run

    routing = read_run(run).routing
    iteration = source.iteration or max((frame.step for frame in routing), default=0)
    frames = [frame for frame in routing if frame.step <= iteration]
    frames = [frame for frame in frames if frame.start == frames[-1].start][-number:]
    if not frames:
        raise UserError("the run has no routing counts up to the checkpoint", where=f"{run}, iteration {iteration}",
                        remedy="give the directory of the run that saved it, trained with the monitor on")
    wrong = next((frame for frame in frames if frame.counts.shape[1] != experts.number
                  or not np.array_equal(frame.layers, frames[0].layers)), None)
    if wrong is not None:
        raise UserError("run and checkpoint are of two models", where=f"{run}, step {wrong.step}",
                        why=f"it counted {wrong.counts.shape[1]} experts in {len(wrong.layers)} layers; the checkpoint "
                        f"has {experts.number} experts",
                        remedy="give the directory of the run that saved the checkpoint")
    decoder = frames[0].layers < experts.layers
    return [replace(frame, layers=frame.layers[decoder], counts=frame.counts[decoder]) for frame in frames]


def _orders(frames: Sequence[RoutingFrame], ranks: int) -> dict[int, balance.Order]:
    """Return the order of each counted layer, by all frames together."""
    counts = np.sum([frame.counts for frame in frames], axis=0)
    return {int(layer): balance.even_order(of, ranks) for layer, of in zip(frames[0].layers, counts, strict=True)}


def _note(source: Source, run: Path, ranks: int, frames: Sequence[RoutingFrame],
          orders: dict[int, balance.Order]) -> dict[str, Any]:
    last = frames[-1].counts
    # On counts that did not choose it: the placement itself is even on its own.
    by_earlier = _orders(frames[:-1], ranks) if len(frames) > 1 else {}
    layers = {}
    for at, (layer, order) in enumerate(orders.items()):
        rank_of = np.arange(len(order)) * ranks // len(order)
        layers[str(layer)] = {
            "last_sample": round(float(balance.excess(last[at], ranks)), 4),
            "last_sample_placed_by_earlier": round(float(balance.excess(last[at][by_earlier[layer]], ranks)), 4)
            if by_earlier else None,
            "moved": int((rank_of[order] != rank_of).sum()),
            # The expert's number before, by its number now.
            "order": order.tolist(),
        }  # fmt: skip
    return {"schema": 1, "source": str(source.folder.absolute()), "run": str(run.absolute()), "ranks": ranks,
            "steps": [frame.step for frame in frames], "layers": layers}


def _explain(note: dict[str, Any]) -> None:
    steps, layers = note["steps"], note["layers"]
    table = Table("layer", "fullest rank, over the mean", "placed by those before", "experts that change rank")
    for name, layer in layers.items():
        table.add_row(name, _percent([layer["last_sample"]]), _percent([layer["last_sample_placed_by_earlier"]]),
                      str(layer["moved"]))  # fmt: skip
    screen.console().print(table)
    now = _percent([layer["last_sample"] for layer in layers.values()])
    placed = _percent([layer["last_sample_placed_by_earlier"] for layer in layers.values()])
    print(f"{note['ranks']} ranks, placed by {len(steps)} samples, steps {steps[0]} to {steps[-1]}.")
    print(f"At step {steps[-1]} the fullest rank got {now} over the mean; placed by the samples before: {placed}.")
    print("Expect about that, and more again as the router changes.")


def _percent(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"+{sum(known) / len(known):.0%}" if known else "not known (one sample)"
