"""Communication of one rank: by collective, what hides under computation, and how many bytes it moved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ext.trace import kinds
from megatron_ext.trace.account import Work, exposed
from megatron_ext.trace.events import Message, Trace
from megatron_ext.trace.intervals import measure


@dataclass(frozen=True)
class Collective:
    """One kind of collective on one rank.

    Args:
        kind: One of kinds.COMMUNICATION.
        total_ns: Time in which at least one of them ran.
        exposed_ns: The part of it in which nothing was computed.
        count: How many ran.
        bytes: Of the messages whose size the trace has, the larger of what goes in and what comes out; 0 for none.
        gbps: Bus bandwidth over those messages' own time, 1e9 bytes/s, as nccl-tests count it; 0 where unknown. That
            time includes waiting for the last rank.
    """

    kind: str
    total_ns: int
    exposed_ns: int
    count: int
    bytes: int
    gbps: float

    @property
    def hidden_ns(self) -> int:
        """The part that ran beside computation."""
        return self.total_ns - self.exposed_ns


@dataclass(frozen=True)
class Communication:
    """All communication of one rank: nanoseconds in which any ran, those without computation, and by collective."""

    total_ns: int
    exposed_ns: int
    collectives: tuple[Collective, ...]

    @property
    def hidden_ns(self) -> int:
        """The part that ran beside computation."""
        return self.total_ns - self.exposed_ns


def communication(trace: Trace, work: Work) -> Communication:
    """Return what a rank's communication took."""
    present = [kind for kind in kinds.COMMUNICATION if (work.kind == work.order.index(kind)).any()]
    return Communication(
        measure(work.of(*present)),
        measure(exposed(work, *present)),
        tuple(_collective(trace, work, kind) for kind in present),
    )


def transfers(trace: Trace, work: Work, kind: str) -> np.ndarray:
    """Return the events that move data: kernels, or on the CPU what gloo's threads ran."""
    events = np.unique(work.event[work.kind == work.order.index(kind)])
    if work.device:
        return events
    moved = events[trace.by_gloo[events]]
    return moved if len(moved) else events


def _collective(trace: Trace, work: Work, kind: str) -> Collective:
    events = transfers(trace, work, kind)
    sized = [(trace.messages[event], event) for event in events.tolist() if event in trace.messages]
    sized = [(message, event) for message, event in sized if _bytes(message)]
    moved = sum(_bytes(message) for message, _ in sized)
    took = sum(int(trace.end[event] - trace.start[event]) for _, event in sized)
    bus = sum(_bytes(message) * bus_factor(kind, message.ranks) for message, _ in sized)
    return Collective(
        kind,
        measure(work.of(kind)),
        measure(exposed(work, kind)),
        len(events),
        moved,
        bus / took if took else 0.0,
    )


def _bytes(message: Message) -> int:
    return max(message.sent, message.received) * message.itemsize


def bus_factor(kind: str, ranks: int) -> float:
    """Return what turns message bytes over time into bus bandwidth (NVIDIA/nccl-tests, doc/PERFORMANCE.md).

    Args:
        kind: The collective.
        ranks: Of the group.
    """
    if ranks < 1:
        return 1.0
    if kind == kinds.ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if kind in (kinds.ALL_TO_ALL, kinds.ALL_GATHER, kinds.REDUCE_SCATTER):
        return (ranks - 1) / ranks
    return 1.0


