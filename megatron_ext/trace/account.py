"""Where the time of a rank's steps went: every nanosecond of the span in exactly one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_ext.errors import UserError
from megatron_ext.trace import host as calls
from megatron_ext.trace import kinds
from megatron_ext.trace.events import CPU_OP, KERNEL, Trace, is_step_mark
from megatron_ext.trace.intervals import Times, Union, between, measure, together, union, without

GPU_IDLE = "idle"
HOST_IDLE = "Python, no operator"
ORDER = (*kinds.COMPUTE, *kinds.COMMUNICATION, kinds.OTHER_OPERATORS, kinds.MEMORY)


@dataclass(frozen=True)
class Work:
    """What ran in a window, by kind.

    Args:
        begin: Of the window, nanoseconds on the rank's clock.
        end: Of the window.
        device: Whether these are kernels of a GPU, else operators on the host.
        steps: Numbers of the profiled steps in the window; empty where the trace marks none.
        event: [pieces] int64, the event that each piece is of: kernels are one piece, operators as many as they were
            the innermost call.
        start: [pieces] int64, inside the window.
        stop: [pieces] int64.
        kind: [pieces] int8, number in `order`.
        order: Kinds in order of precedence.
    """

    begin: int
    end: int
    device: bool
    steps: tuple[int, ...]
    event: Times
    start: Times
    stop: Times
    kind: Times
    order: tuple[str, ...] = ORDER

    @property
    def span(self) -> int:
        """Nanoseconds of the window."""
        return self.end - self.begin

    def of(self, *wanted: str) -> Union:
        """Return when any of some kinds ran."""
        chosen = np.isin(self.kind, [self.order.index(kind) for kind in wanted])
        return union(self.start[chosen], self.stop[chosen])

    @cached_property
    def idle(self) -> Union:
        """When nothing ran."""
        return between(union(self.start, self.stop), self.begin, self.end)


@dataclass(frozen=True)
class Row:
    """A kind's share of the span.

    Args:
        kind: What it is for.
        span_ns: Time of the span that counts as this kind's; the rows of a table add up to the span.
        busy_ns: Sum over its events, whatever ran beside them.
        count: Its events.
    """

    kind: str
    span_ns: int
    busy_ns: int
    count: int


def work_of(trace: Trace, step: int | None = None) -> Work:
    """Return what a rank ran in its profiled steps.

    Args:
        trace: The rank.
        step: Only this step of the profiler; None for all.

    Raises:
        UserError: The step was not recorded, or the trace has neither kernels nor operators.
    """
    begin, end, steps = _window(trace, step)
    event, start, stop, kind = _device_pieces(trace) if trace.has_device else _host_pieces(trace)
    start, stop = np.maximum(start, begin), np.minimum(stop, end)
    inside = stop > start
    if not inside.any():
        raise UserError(
            "the trace holds no work",
            where=str(trace.path),
            why="no kernel and no operator lies in the profiled steps",
            remedy="profile later steps, with CUPTI free: no other profiler at the same time",
        )
    return Work(begin, end, trace.has_device, steps, event[inside], start[inside], stop[inside], kind[inside])


def rows_of(work: Work) -> list[Row]:
    """Return the table: kinds that occur, in order of precedence, then what is left."""
    rows = []
    taken: Union = (np.empty(0, np.int64), np.empty(0, np.int64))
    covered = 0
    for number, kind in enumerate(work.order):
        chosen = work.kind == number
        if not chosen.any():
            continue
        taken = together((taken, union(work.start[chosen], work.stop[chosen])))
        now = measure(taken)
        busy = int((work.stop[chosen] - work.start[chosen]).sum())
        rows.append(Row(kind, now - covered, busy, len(np.unique(work.event[chosen]))))
        covered = now
    idle = GPU_IDLE if work.device else HOST_IDLE
    rows.append(Row(idle, work.span - covered, work.span - covered, len(work.idle[0])))
    assert sum(row.span_ns for row in rows) == work.span
    return rows


def exposed(work: Work, *wanted: str) -> Union:
    """Return when some kinds of communication ran while nothing was computed."""
    return without(work.of(*wanted), work.of(*kinds.COMPUTE))


def _window(trace: Trace, step: int | None) -> tuple[int, int, tuple[int, ...]]:
    steps = trace.steps
    if step is not None and step not in steps:
        raise UserError(
            f"step {step} is not in the trace",
            where=str(trace.path),
            why=f"it holds {', '.join(map(str, steps)) or 'no marked step'}",
            remedy="leave --step out, or name one of these",
            exit_code=64,
        )
    device = trace.on_device
    if step is not None:
        return (*steps[step], (step,))
    if steps:
        begin, end = min(start for start, _ in steps.values()), max(stop for _, stop in steps.values())
        # The GPU may still work on a step that the host has left.
        return begin, max(end, int(trace.end[device].max(initial=end))), tuple(steps)
    counted = device if device.any() else trace.category == CPU_OP
    if not counted.any():
        counted = np.ones(len(trace), bool)
    return int(trace.start[counted].min()), int(trace.end[counted].max()), ()


def _device_pieces(trace: Trace) -> tuple[Times, Times, Times, Times]:
    event = np.flatnonzero(trace.on_device).astype(np.int64)
    number = {kind: at for at, kind in enumerate(ORDER)}
    by_name = np.array([number[kinds.kernel_kind(name)] for name in trace.names], np.int64)
    kind = np.where(trace.category[event] == KERNEL, by_name[trace.name[event]], number[kinds.MEMORY])
    unclear = number[kinds.UNKNOWN_PAIRS]
    for at in np.flatnonzero(kind == unclear).tolist():
        # NCCL's one kernel for all transfers between pairs: the call says what they were.
        message = trace.messages.get(int(event[at]))
        if message is not None:
            kind[at] = number[kinds.collective(message.collective)]
    return event, trace.start[event], trace.end[event], kind


def _host_pieces(trace: Trace) -> tuple[Times, Times, Times, Times]:
    host = calls.nest(trace, python=False)
    pieces = calls.self_times(trace, host, calls.compute_threads(trace))
    kind = _kinds_of_calls(trace, host)
    marked = kind[pieces.event] >= 0
    moves = np.flatnonzero(trace.by_gloo).astype(np.int64)
    return (
        np.concatenate((pieces.event[marked], moves)),
        np.concatenate((pieces.start[marked], trace.start[moves])),
        np.concatenate((pieces.end[marked], trace.end[moves])),
        np.concatenate((kind[pieces.event[marked]], kind[moves])),
    )


def _kinds_of_calls(trace: Trace, host: calls.Host) -> Times:
    """Return [events] the kind of each call of the host, -1 for the mark of a step, which is none."""
    number: Mapping[str, int] = {kind: at for at, kind in enumerate(ORDER)}
    other = number[kinds.OTHER_OPERATORS]
    caller = [kinds.caller_kind(name) for name in trace.names]
    own = [kinds.operator_kind(name) for name in trace.names]
    mark = [is_step_mark(name) for name in trace.names]
    kind = np.full(len(trace), -1, np.int64)
    inherits = np.zeros(len(trace), bool)
    for row in host.rows.tolist():
        name, parent = int(trace.name[row]), int(host.parent[row])
        if mark[name]:
            continue
        above = int(kind[parent]) if parent >= 0 else -1
        if parent >= 0 and inherits[parent]:
            kind[row], inherits[row] = above, True
        elif caller[name] is not None:
            kind[row], inherits[row] = number[caller[name] or ""], True
        elif own[name] is not None:
            kind[row] = number[own[name] or ""]
        else:
            kind[row] = above if above >= 0 else other
    return kind
