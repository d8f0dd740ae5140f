"""Several ranks side by side: who keeps whom waiting in collectives, and how uneven the experts' products are.

Clocks of nodes differ. A collective ends at about the same time on every rank of its group, so the median difference
of ends gives the clocks' offset; what is left of the difference of starts is who came late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.trace import kinds
from megatron_ext.trace.account import Work
from megatron_ext.trace.comms import transfers
from megatron_ext.trace.events import Trace
from megatron_ext.trace.intervals import Times, measure

# In these every rank waits for every other; a broadcast's root or a sender does not.
_WAIT_FOR_ALL = (kinds.ALL_TO_ALL, kinds.ALL_GATHER, kinds.REDUCE_SCATTER, kinds.ALL_REDUCE, kinds.EXPERT_TRANSPORT)


@dataclass(frozen=True)
class Arrival:
    """Collectives of one kind over some ranks.

    Args:
        kind: The collective.
        count: How many were matched.
        last: How often each rank came last, by position of the rank.
        waited_ns: What each rank waited in them for the last one to come.
        caused_ns: What all others waited for each rank, where it was last.
    """

    kind: str
    count: int
    last: tuple[int, ...]
    waited_ns: tuple[int, ...]
    caused_ns: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """What several ranks say together.

    Args:
        offsets_ns: Of each rank's clock from the first one's.
        arrivals: By kind of collective.
        experts_ns: Time of each rank in grouped GEMMs; empty where there are none.
        notes: What could not be compared, and why.
    """

    offsets_ns: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    experts_ns: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def waited_ns(self) -> tuple[int, ...]:
        """What each rank waited in all matched collectives."""
        return tuple(sum(column) for column in zip(*(a.waited_ns for a in self.arrivals), strict=True))

    @property
    def caused_ns(self) -> tuple[int, ...]:
        """What the others waited for each rank."""
        return tuple(sum(column) for column in zip(*(a.caused_ns for a in self.arrivals), strict=True))

    @property
    def imbalance(self) -> float:
        """Longest time in grouped GEMMs over the mean, minus 1; 0 is even."""
        mean = sum(self.experts_ns) / len(self.experts_ns) if self.experts_ns else 0.0
        return max(self.experts_ns) / mean - 1 if mean else 0.0


def compare(traces: Sequence[Trace], works: Sequence[Work]) -> Comparison:
    """Match the collectives of two or more ranks, in order, group by group."""
    series = [_series(trace, work) for trace, work in zip(traces, works, strict=True)]
    notes: list[str] = []
    matched: list[tuple[str, list[int], Times, Times]] = []
    for key in sorted(set().union(*series)):
        kind, group = key
        members = [at for at, one in enumerate(series) if key in one]
        if len(members) < 2:
            continue
        counts = Counter(len(series[at][key]) for at in members)
        if len(counts) > 1:
            notes.append(f"{kind}{f' of {group}' if group else ''}: "
                         f"{', '.join(str(len(series[at][key])) for at in members)} on ranks "
                         f"{', '.join(_label(traces[at], at) for at in members)}, so they are not matched")  # fmt: skip
            continue
        start = np.stack([traces[at].start[series[at][key]] for at in members])
        end = np.stack([traces[at].end[series[at][key]] for at in members])
        matched.append((kind, members, start, end))
    offsets = _offsets(len(traces), matched)
    experts = tuple(measure(work.of("grouped GEMM")) for work in works)
    if not any(experts):
        experts = ()
        notes.append("no grouped GEMM in the traces: the experts' products cannot be told from others")
    return Comparison(tuple(offsets), tuple(_arrivals(len(traces), matched, offsets)), experts, tuple(notes))


def _series(trace: Trace, work: Work) -> dict[tuple[str, str], Times]:
    """Return the events of each kind and group, in order of start."""
    found: dict[tuple[str, str], Times] = {}
    for kind in _WAIT_FOR_ALL:
        events = transfers(trace, work, kind)
        messages = [trace.messages.get(event) for event in events.tolist()]
        groups = np.array([message.group if message else "" for message in messages], object)
        # One rank alone waits for nobody.
        alone = np.array([message is not None and message.ranks == 1 for message in messages], bool)
        for group in sorted(set(groups[~alone].tolist())):
            found[kind, group] = events[(groups == group) & ~alone]
    return found


def _offsets(ranks: int, matched: list[tuple[str, list[int], Times, Times]]) -> list[int]:
    """Return each rank's clock minus the first one's, through whatever groups join them."""
    offsets: dict[int, int] = {0: 0}
    while True:
        grown = False
        for at in range(ranks):
            if at in offsets:
                continue
            shared = [(m, members, end) for m, (_, members, _, end) in enumerate(matched) if at in members]
            differences = [
                end[members.index(at)] - end[members.index(known)] + offsets[known]
                for _, members, end in shared
                for known in [next((other for other in members if other in offsets), None)]
                if known is not None
            ]
            if differences:
                offsets[at] = int(np.median(np.concatenate(differences)))
                grown = True
        if not grown:
            return [offsets.get(at, 0) for at in range(ranks)]


def _arrivals(
    ranks: int, matched: list[tuple[str, list[int], Times, Times]], offsets: Sequence[int]
) -> list[Arrival]:
    found = []
    for kind in dict.fromkeys(kind for kind, *_ in matched):
        count = 0
        last, waited, caused = (np.zeros(ranks, np.int64) for _ in range(3))
        for _, members, start, end in (one for one in matched if one[0] == kind):
            clock = np.array([offsets[at] for at in members], np.int64)[:, None]
            arrived = start - clock
            latest = arrived.argmax(0)
            # Nobody waits longer than its own call took: what an asynchronous call left behind is not waited for.
            wait = np.minimum(arrived.max(0) - arrived, end - start)
            count += wait.shape[1]
            for at, place in enumerate(members):
                last[place] += int((latest == at).sum())
                waited[place] += int(wait[at].sum())
                caused[place] += int(wait[:, latest == at].sum())
        found.append(Arrival(kind, count, *(tuple(part.tolist()) for part in (last, waited, caused))))
    return found


def _label(trace: Trace, at: int) -> str:
    return str(at if trace.rank is None else trace.rank)
