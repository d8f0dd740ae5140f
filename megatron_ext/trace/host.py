"""What the host did: which call stands inside which, and how long each was itself running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.trace.events import ANNOTATION, CPU_OP, DRIVER, PYTHON, RUNTIME, Trace, is_step_mark
from megatron_ext.trace.intervals import Times

# Calls in which the host waits for the GPU. The copies wait where the host's memory is pageable.
_WAITS = frozenset(
    {
        "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize",
        "cuCtxSynchronize", "cuEventSynchronize", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "hipStreamSynchronize",
        "hipDeviceSynchronize", "hipEventSynchronize",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Host:
    """The calls of the host's threads, nested.

    Args:
        rows: [calls] int64, the event of each call, in order of start.
        parent: [events] int64, the event of the innermost call around each event of the host; -1 for none.
    """

    rows: Times
    parent: Times

    def around(self, event: int) -> list[int]:
        """Return the calls around an event, the innermost first."""
        found = []
        event = int(self.parent[event])
        while event >= 0:
            found.append(event)
            event = int(self.parent[event])
        return found


@dataclass(frozen=True)
class Segments:
    """Times at which a call was the innermost one of its thread: [segments] int64 each."""

    start: Times
    end: Times
    event: Times


def nest(trace: Trace, *, python: bool = True) -> Host:
    """Return which call stands in which, over operators, annotations, the runtime's calls and, if asked, Python's."""
    wanted = [CPU_OP, ANNOTATION, RUNTIME, DRIVER, *([PYTHON] if python else [])]
    rows = np.flatnonzero(np.isin(trace.category, wanted))
    parent = np.full(len(trace), -1, np.int64)
    start, end = trace.start[rows].tolist(), trace.end[rows].tolist()
    stacks: dict[int, list[tuple[int, int]]] = {}
    for row, thread, begin, stop in zip(rows.tolist(), trace.thread[rows].tolist(), start, end, strict=True):
        stack = stacks.setdefault(thread, [])
        while stack and stack[-1][0] <= begin:
            stack.pop()
        if stack:
            parent[row] = stack[-1][1]
        stack.append((stop, row))
    return Host(rows, parent)


def self_times(trace: Trace, host: Host, threads: Sequence[int]) -> Segments:
    """Return when each call was the innermost of its thread, on some threads."""
    pieces: tuple[list[int], list[int], list[int]] = ([], [], [])
    for thread in threads:
        rows = host.rows[trace.thread[host.rows] == thread]
        _thread_pieces(rows.tolist(), trace.start[rows].tolist(), trace.end[rows].tolist(), pieces)
    start, end, event = (np.array(piece, np.int64) for piece in pieces)
    return Segments(start, end, event)


def _thread_pieces(
    rows: list[int], start: list[int], end: list[int], pieces: tuple[list[int], list[int], list[int]]
) -> None:
    stack: list[tuple[int, int]] = []  # end and event of the calls that are open
    reached = 0

    def add(until: int) -> None:
        nonlocal reached
        if stack and until > reached:
            for piece, value in zip(pieces, (reached, until, stack[-1][1]), strict=True):
                piece.append(value)
        reached = max(reached, until)

    def close(until: int) -> None:
        while stack and stack[-1][0] <= until:
            add(stack[-1][0])
            stack.pop()

    for row, begin, stop in zip(rows, start, end, strict=True):
        close(begin)
        add(begin)
        stack.append((stop, row))
    close(max(end, default=0))


@dataclass(frozen=True)
class Wait:
    """Waits of the host by call and place.

    Args:
        call: The runtime's function.
        place: Where it was called from.
        total_ns: Time in it.
        longest_ns: The longest one.
        count: How many.
    """

    call: str
    place: str
    total_ns: int
    longest_ns: int
    count: int


def wait_rows(trace: Trace) -> Times:
    """Return the events in which the host waits for the GPU: synchronizations, and copies of pageable memory."""
    names = np.array([name in _WAITS for name in trace.names], bool)
    pageable = np.array(["Pageable" in name for name in trace.names], bool)
    launched = trace.correlation[trace.on_device & pageable[trace.name]]
    runtime = np.isin(trace.category, (RUNTIME, DRIVER))
    copies = runtime & np.isin(trace.correlation, launched[launched != 0])
    return np.flatnonzero(runtime & names[trace.name] | copies).astype(np.int64)


def waits(trace: Trace, host: Host, begin: int, end: int) -> list[Wait]:
    """Return the host's waits in a window, the longest sum first."""
    found: dict[tuple[str, str], list[int]] = {}
    for event in wait_rows(trace).tolist():
        took = min(int(trace.end[event]), end) - max(int(trace.start[event]), begin)
        if took > 0:
            found.setdefault((trace.name_of(event), place(trace, host, event)), []).append(took)
    rows = [Wait(call, where, sum(took), max(took), len(took)) for (call, where), took in found.items()]
    return sorted(rows, key=lambda row: -row.total_ns)


def place(trace: Trace, host: Host, event: int) -> str:
    """Return where a call comes from: the operators around it, and the frame of Python where frames were recorded."""
    around = host.around(event)
    operators = [trace.name_of(row) for row in around if trace.category[row] in (CPU_OP, ANNOTATION)]
    operators = [name for name in operators if not is_step_mark(name)]
    frame = next((trace.name_of(row) for row in around if trace.category[row] == PYTHON and _is_ours(trace, row)), "")
    # The innermost says what was done, the outermost for what.
    calls = " < ".join(dict.fromkeys([*operators[:1], *operators[-1:]]))
    return " at ".join(part for part in (calls, _short_frame(frame)) if part) or "Python, no operator"


def _is_ours(trace: Trace, event: int) -> bool:
    name = trace.name_of(event)
    return ".py(" in name and "site-packages" not in name and not name.startswith(("torch/", "<"))


def _short_frame(name: str) -> str:
    """Return `file.py(line): function` with at most two folders before it."""
    file, bracket, rest = name.partition("(")
    return "/".join(file.split("/")[-3:]) + bracket + rest


def busiest(trace: Trace, host: Host, thread: int | None, begin: int, end: int) -> str:
    """Return what the host was doing in a window: the innermost call that covers most of it.

    Args:
        trace: The rank.
        host: Its calls.
        thread: The thread that launched what ends the window; None for any.
        begin: Of the window, nanoseconds.
        end: Of the window.
    """
    rows = host.rows[(trace.start[host.rows] < end) & (trace.end[host.rows] > begin)]
    if thread is not None:
        rows = rows[trace.thread[rows] == thread]
    rows = rows[[not is_step_mark(trace.name_of(row)) for row in rows.tolist()]]
    if not len(rows):
        return "Python, no call recorded"
    took = np.minimum(trace.end[rows], end) - np.maximum(trace.start[rows], begin)
    most = rows[took * 2 >= end - begin]
    if len(most):
        event = int(most[np.argmin(trace.end[most] - trace.start[most])])
        return described(trace, host, event)
    event = int(rows[np.argmax(took)])
    share = took.max() / (end - begin)
    return f"Python between calls; the longest, {described(trace, host, event)}, took {share:.0%}"


def described(trace: Trace, host: Host, event: int) -> str:
    """Return a call's name with where it comes from."""
    name = _short_frame(trace.name_of(event)) if trace.category[event] == PYTHON else trace.name_of(event)
    where = place(trace, host, event)
    return name if where in ("", name, "Python, no operator") else f"{name} in {where}"


def launches(trace: Trace) -> dict[int, int]:
    """Return correlation -> the event of the runtime's call that launched it."""
    rows = np.flatnonzero(np.isin(trace.category, (RUNTIME, DRIVER)) & (trace.correlation != 0))
    return dict(zip(trace.correlation[rows].tolist(), rows.tolist(), strict=True))


def compute_threads(trace: Trace) -> list[int]:
    """Return the threads that run operators; without those of gloo, which only move data."""
    movers = np.unique(trace.thread[trace.by_gloo])
    workers: NDArray[np.int32] = np.unique(trace.thread[trace.category == CPU_OP])
    return [int(thread) for thread in workers if thread not in movers]
