"""The board: which alarms stand, and what is new about them. Said once, then on a change, then when cleared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.observe.alarms.rule import Finding
from megatron_ext.observe.names import ALARMS, METRICS, Worse
from megatron_ext.observe.sink import CHANGED, CLEARED, RAISED, AlarmRecord

# A finding has to be absent from this many samples in a row before its alarm is cleared.
_ABSENT = 2
# A change is said when the value is this many times as bad as when last said.
_WORSE = 2.0


@dataclass
class _Standing:
    """An alarm that stands: its last record, as said, and for how many samples it was not found."""

    said: AlarmRecord
    absent: int = 0


class Board:
    """The alarms that stand, one a (rule, layer)."""

    def __init__(self) -> None:
        """Start with none."""
        self._standing: dict[tuple[str, int | None], _Standing] = {}

    def update(
        self,
        step: int,
        findings: Iterable[tuple[str, Finding]],
        recovered: Callable[[AlarmRecord], bool] = lambda said: True,
    ) -> list[AlarmRecord]:
        """Take all findings of a sample and return what is new, worst first said.

        Args:
            step: The sample's.
            findings: (rule's name, finding) pairs.
            recovered: Whether an alarm that stands and isn't among the findings is over (`Rule.recovered`).
        """
        found = {(name, finding.layer): finding for name, finding in findings}
        news = [record for key, finding in found.items() if (record := self._seen(step, key, finding))]
        for key in [key for key in self._standing if key not in found]:
            standing = self._standing[key]
            standing.absent = standing.absent + 1 if recovered(standing.said) else 0
            if standing.absent >= _ABSENT:
                news.append(_with(standing.said, state=CLEARED, step=step))
                del self._standing[key]
        return news

    @property
    def standing(self) -> int:
        """Return how many alarms stand."""
        return len(self._standing)

    def layers_by_metric(self) -> dict[str, set[int]]:
        """Return metric -> layers at which an alarm about it stands."""
        out: dict[str, set[int]] = {}
        for (_, layer), standing in self._standing.items():
            if layer is not None:
                out.setdefault(standing.said.metric, set()).add(layer)
        return out

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take over what stands after these lines of `alarms.jsonl`, in order; others say nothing."""
        for plain in records:
            try:
                record = AlarmRecord.from_json(plain)
            except (KeyError, TypeError, ValueError):
                continue
            if record.state == CLEARED:
                self._standing.pop((record.name, record.layer), None)
            else:
                self._standing[record.name, record.layer] = _Standing(record)

    def _seen(self, step: int, key: tuple[str, int | None], finding: Finding) -> AlarmRecord | None:
        standing = self._standing.get(key)
        record = _record(step, key[0], finding)
        if standing is None:
            self._standing[key] = _Standing(record)
            return record
        standing.absent = 0
        said = standing.said
        moved = record.metric != said.metric or (record.expert, record.rank) != (said.expert, said.rank)
        if not (moved and step - said.step >= 20) and not _much_worse(record, said):
            return None
        standing.said = _with(record, state=CHANGED, since_step=said.since_step)
        return standing.said


def _much_worse(now: AlarmRecord, said: AlarmRecord) -> bool:
    if now.metric != said.metric:
        return False
    if math.isnan(now.value):
        return not math.isnan(said.value)
    if METRICS[now.metric].worse is Worse.DOWN:
        return now.value < said.value / _WORSE
    return now.value > said.value * _WORSE


def _record(step: int, name: str, finding: Finding) -> AlarmRecord:
    alarm = ALARMS[name]
    return AlarmRecord(
        name=name,
        state=RAISED,
        step=step,
        since_step=finding.since,
        layer=finding.layer,
        expert=finding.expert,
        rank=finding.rank,
        metric=finding.metric,
        value=finding.value,
        limit=finding.limit,
        why=finding.why or alarm.why,
        remedy=alarm.remedy,
        link=alarm.link,
    )


def _with(record: AlarmRecord, **changes: Any) -> AlarmRecord:
    return AlarmRecord(**{**record.as_json(), **changes})
