"""The longest times in which a GPU did nothing, and what the host was doing meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ext.trace import host as calls
from megatron_ext.trace import kinds
from megatron_ext.trace.account import Work
from megatron_ext.trace.events import Trace
from megatron_ext.trace.intervals import Times

# A wait that ended this shortly before or after a gap began is why the host had nothing queued.
_JUST_BEFORE_NS = 50_000


@dataclass(frozen=True)
class Gap:
    """A time without kernels.

    Args:
        at_ns: Since the begin of the span.
        took_ns: Its length.
        before: Kernel that ended last before it; empty at the begin.
        after: Kernel that ended it; empty at the end.
        host: What the host was doing.
        wait: The host's wait for the GPU that ended as the gap began, with its place; empty where there was none. After
            a wait the host starts launching again with an empty queue.
    """

    at_ns: int
    took_ns: int
    before: str
    after: str
    host: str
    wait: str


@dataclass(frozen=True)
class Pair:
    """Gaps between the same two kernels: how many and how long together."""

    before: str
    after: str
    total_ns: int
    count: int


def longest(trace: Trace, work: Work, host: calls.Host, count: int) -> list[Gap]:
    """Return the longest gaps of a GPU, the longest first.

    Args:
        trace: The rank.
        work: Its work on a device.
        host: Its calls.
        count: At most so many.
    """
    left, right = work.idle
    chosen = np.argsort(left - right, kind="stable")[:count]
    left, right = left[chosen], right[chosen]
    launched = calls.launches(trace)
    waits = calls.wait_rows(trace)
    found = []
    for begin, end, before, after in zip(
        left.tolist(), right.tolist(), *(side.tolist() for side in _neighbours(work, left, right)), strict=True
    ):
        launch = launched.get(int(trace.correlation[after]), -1) if after >= 0 else -1
        thread = int(trace.thread[launch]) if launch >= 0 else None
        found.append(
            Gap(
                begin - work.begin,
                end - begin,
                kinds.short(trace.name_of(before)) if before >= 0 else "",
                kinds.short(trace.name_of(after)) if after >= 0 else "",
                calls.busiest(trace, host, thread, begin, end),
                _wait_before(trace, host, waits, begin, end),
            )
        )
    return found


def pairs(trace: Trace, work: Work) -> list[Pair]:
    """Return all gaps by the kernels around them, the longest sum first."""
    left, right = work.idle
    # Names by number, -1 for the window's edge.
    names = [np.where(side >= 0, trace.name[side], -1) for side in _neighbours(work, left, right)]
    found: dict[tuple[str, str], list[int]] = {}
    for before, after, took in zip(names[0].tolist(), names[1].tolist(), (right - left).tolist(), strict=True):
        sums = found.setdefault((_short(trace, before), _short(trace, after)), [0, 0])
        sums[0] += took
        sums[1] += 1
    rows = [Pair(before, after, total, count) for (before, after), (total, count) in found.items()]
    return sorted(rows, key=lambda row: -row.total_ns)


def _short(trace: Trace, name: int) -> str:
    return kinds.short(trace.names[name]) if name >= 0 else ""


def after_waits(trace: Trace, work: Work) -> int:
    """Return the nanoseconds of gaps that began as the host came back from waiting for the GPU."""
    left, right = work.idle
    waits = calls.wait_rows(trace)
    begun, ended = np.sort(trace.start[waits]), np.sort(trace.end[waits])
    # A wait that had begun before the gap and ended around its begin. Waits of one thread do not overlap, so it is
    # enough to count: more have begun before the gap than had ended shortly before it.
    open_waits = np.searchsorted(begun, left, "left") - np.searchsorted(ended, left - _JUST_BEFORE_NS, "right")
    ends_inside = np.searchsorted(ended, right, "right") - np.searchsorted(ended, left - _JUST_BEFORE_NS, "right")
    return int((right - left)[(open_waits > 0) & (ends_inside > 0)].sum())


def _neighbours(work: Work, begin: Times, end: Times) -> tuple[Times, Times]:
    """Return the events that end last before and start first after each gap, -1 for the window's edge."""
    ends, starts = np.argsort(work.stop, kind="stable"), np.argsort(work.start, kind="stable")
    before = np.searchsorted(work.stop[ends], begin, "right") - 1
    after = np.searchsorted(work.start[starts], end, "left")
    last = len(starts) - 1
    return (
        np.where(before >= 0, work.event[ends[before]], -1),
        np.where(after <= last, work.event[starts[np.minimum(after, last)]], -1),
    )


def _wait_before(trace: Trace, host: calls.Host, waits: Times, begin: int, end: int) -> str:
    near = waits[
        (trace.start[waits] < begin) & (trace.end[waits] >= begin - _JUST_BEFORE_NS) & (trace.end[waits] <= end)
    ]
    if not len(near):
        return ""
    event = int(near[np.argmax(trace.end[near])])
    return calls.described(trace, host, event)
