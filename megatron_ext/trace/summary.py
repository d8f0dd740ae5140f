"""What one rank's trace says, and what all say together: plain values for the table and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.trace import account, comms, gaps
from megatron_ext.trace import host as calls
from megatron_ext.trace.account import Row, Work
from megatron_ext.trace.comms import Communication
from megatron_ext.trace.events import Trace
from megatron_ext.trace.gaps import Gap, Pair
from megatron_ext.trace.host import Wait
from megatron_ext.trace.intervals import measure


@dataclass(frozen=True)
class Named:
    """A kernel or operator: name, kind, nanoseconds of its own, and how many there were."""

    name: str
    kind: str
    total_ns: int
    count: int


@dataclass(frozen=True)
class RankSummary:
    """Where one rank's steps went; times in nanoseconds.

    Args:
        rank: Its number, or its place among the files where the trace names none.
        path: The file.
        device: Whether a GPU was recorded; else the host's operators are counted.
        steps: Numbers of the profiled steps, of torch's profiler; empty where none is marked.
        span_ns: From the first step's begin on the host to the last step's end, or to the last kernel's if later.
        rows: The table; adds up to the span.
        communication: By collective.
        names: Kernels or operators, the longest first.
        idle_ns: Of the span, with nothing on the GPU (with no operator on the host).
        idle_after_wait_ns: Of it, in gaps that began as the host came back from a wait for the GPU.
        gaps: The longest.
        pairs: Gaps by the kernels around them.
        waits: Of the host for the GPU.
    """

    rank: int
    path: str
    device: bool
    steps: tuple[int, ...]
    span_ns: int
    rows: tuple[Row, ...]
    communication: Communication
    names: tuple[Named, ...]
    idle_ns: int
    idle_after_wait_ns: int
    gaps: tuple[Gap, ...]
    pairs: tuple[Pair, ...]
    waits: tuple[Wait, ...]


def summarize(trace: Trace, work: Work, *, place: int = 0, gap_count: int = 10) -> RankSummary:
    """Return what a trace says.

    Args:
        trace: One rank.
        work: Its work.
        place: Number to use where the trace names no rank.
        gap_count: Gaps to describe at most.
    """
    # Gaps and waits are of a GPU: without one there is nothing that the host could wait for.
    host = calls.nest(trace) if work.device else None
    return RankSummary(
        rank=place if trace.rank is None else trace.rank,
        path=str(trace.path),
        device=work.device,
        steps=work.steps,
        span_ns=work.span,
        rows=tuple(account.rows_of(work)),
        communication=comms.communication(trace, work),
        names=tuple(by_name(trace, work)),
        idle_ns=measure(work.idle),
        idle_after_wait_ns=gaps.after_waits(trace, work) if host else 0,
        gaps=tuple(gaps.longest(trace, work, host, gap_count)) if host else (),
        pairs=tuple(gaps.pairs(trace, work)) if host else (),
        waits=tuple(calls.waits(trace, host, work.begin, work.end)) if host else (),
    )


def by_name(trace: Trace, work: Work) -> list[Named]:
    """Return kernels or operators by name, the longest sum of their own time first."""
    name = trace.name[work.event].astype(np.int64)
    key, inverse = np.unique(name * len(work.order) + work.kind, return_inverse=True)
    took = np.bincount(inverse, weights=(work.stop - work.start).astype(np.float64), minlength=len(key))
    # An operator has a piece for each time at which it was the innermost, and counts once.
    _, first = np.unique(work.event, return_index=True)
    count = np.bincount(inverse[first], minlength=len(key))
    rows = [
        Named(trace.names[number // len(work.order)], work.order[number % len(work.order)], int(total), int(many))
        for number, total, many in zip(key.tolist(), took, count, strict=True)
    ]
    return sorted(rows, key=lambda row: (-row.total_ns, row.name))


def work_kinds(ranks: Sequence[RankSummary]) -> list[str]:
    """Return the kinds of all ranks' tables, in order of precedence, what is left last."""
    present = {row.kind for rank in ranks for row in rank.rows}
    return [kind for kind in (*account.ORDER, account.GPU_IDLE, account.HOST_IDLE) if kind in present]
