"""`megatron-moe trace FILE_OR_FOLDER ...`: where a profiled step went."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.trace import account, ranks
from megatron_ext.trace.advice import first_look
from megatron_ext.trace.events import Trace
from megatron_ext.trace.read import find_files, read_traces
from megatron_ext.trace.summary import RankSummary, summarize
from megatron_ext.usage import whole

SCHEMA = 1


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "traces", nargs="+", type=Path, metavar="FILE_OR_FOLDER",
        help="traces of torch's profiler, of one run, one a rank (.json, .json.gz), their folder, or the run directory",
    )  # fmt: skip
    parser.add_argument("--step", type=whole(0), help="only this step, by its number in the trace (ProfilerStep#N)")
    parser.add_argument("--rank", type=whole(0), help="list its gaps and waits (default: the rank that idles most)")
    parser.add_argument("--top", type=whole(), default=10, help="rows of each list (default 10)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure as JSON; - prints it instead")


def run(args: Namespace) -> int:
    """Print the tables, and write the JSON that was asked for.

    Raises:
        UserError: A file is no whole trace of torch's profiler, or what was asked for is not in it.
    """
    printed = args.json is not None and str(args.json) == "-"
    if args.json is not None and not printed:
        _refuse_overwriting(args.json, find_files(args.traces))
    traces = read_traces(args.traces)
    works = [account.work_of(trace, args.step) for trace in traces]
    _refuse_mixture(traces, works)
    found = [summarize(trace, work, place=at, gap_count=max(args.top, 40))
             for at, (trace, work) in enumerate(zip(traces, works, strict=True))]  # fmt: skip
    comparison = ranks.compare(traces, works) if len(traces) > 1 else None
    notes = notes_on(traces, found)
    if args.rank is not None and args.rank not in [rank.rank for rank in found]:
        raise UserError(f"rank {args.rank} is not among the traces", where=f"--rank {args.rank}",
                        remedy=f"name one of {', '.join(str(rank.rank) for rank in found)}", exit_code=64)  # fmt: skip
    if args.json is not None:
        text = json.dumps(record(found, comparison, notes), indent=1)
        if printed:
            print(text)
            return 0
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n")
    from megatron_ext import screen
    from megatron_ext.trace.show import show

    show(found, comparison, notes, screen.console(), detail=args.rank, top=args.top)
    return 0


def record(
    found: Sequence[RankSummary], comparison: ranks.Comparison | None, notes: Sequence[str]
) -> dict[str, Any]:
    """Return everything as plain values; times in nanoseconds."""
    together: dict[str, Any] | None = None
    if comparison is not None:
        together = {
            **asdict(comparison), "waited_ns": comparison.waited_ns, "caused_ns": comparison.caused_ns,
            "imbalance": comparison.imbalance,
        }  # fmt: skip
    return {
        "schema": SCHEMA,
        "ranks": [asdict(rank) for rank in found],
        "comparison": together,
        "notes": list(notes),
        "first_look": asdict(first_look(found, comparison)),
    }


def notes_on(traces: Sequence[Trace], found: Sequence[RankSummary]) -> list[str]:
    """Return what a reader should know about the files: ranks that are missing or unnamed, steps that differ."""
    notes = []
    if any(trace.rank is None for trace in traces):
        notes.append("a trace names no rank, and neither does its file (rank-N.json): numbered by the order of names")
    world = max(trace.world_size for trace in traces)
    missing = sorted(set(range(world)) - {rank.rank for rank in found})
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        notes.append(f"the job had {world} ranks; not among the traces: {shown} (--profile-ranks chooses them)")
    if len({rank.steps for rank in found}) > 1:
        notes.append("the traces hold different steps: compare them with --step N")
    return notes


def _refuse_mixture(traces: Sequence[Trace], works: Sequence[account.Work]) -> None:
    without = [str(trace.path) for trace, work in zip(traces, works, strict=True) if not work.device]
    if without and len(without) < len(traces):
        raise UserError(
            "some traces hold a GPU's kernels and some do not",
            where=", ".join(without),
            why="they are of different runs, or CUPTI was taken by another profiler on those ranks",
            remedy="give the traces of one run",
        )


def _refuse_overwriting(out: Path, traces: Sequence[Path]) -> None:
    is_trace = out.is_file() and (out.suffix == ".gz" or b'"traceEvents"' in out.open("rb").read(1 << 16))
    if is_trace or out.resolve() in [trace.resolve() for trace in traces]:
        raise UserError("the JSON would overwrite a trace", where=f"--json {out}",
                        remedy="name another file, traces after it", exit_code=64)  # fmt: skip
