"""What a rule is: from the newest sample and the history to findings. It keeps no state; the history does."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron_ext.observe.alarms.history import History
from megatron_ext.observe.options import AlarmOptions
from megatron_ext.observe.sample import Sample
from megatron_ext.observe.sink import AlarmRecord


@dataclass(frozen=True)
class Finding:
    """A rule that holds now, at one layer or for the whole step.

    Attributes:
        metric: The measure that crossed its limit.
        value: Its value now.
        limit: The threshold.
        since: The first step at which it was over.
        layer: Global layer number, None for the whole step.
        expert: The expert it is about.
        rank: The expert-parallel rank it is about.
        why: Instead of the alarm's own sentence, "" to keep that.
    """

    metric: str
    value: float
    limit: float
    since: int
    layer: int | None = None
    expert: int | None = None
    rank: int | None = None
    why: str = ""


class Rule(ABC):
    """One alarm.

    Class attributes:
        name: A name of `names.ALARMS`.
        watches: The per-layer metrics that the history has to keep for it.
    """

    name: ClassVar[str]
    watches: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: AlarmOptions) -> None:
        """Keep the thresholds."""
        self.options = options

    @abstractmethod
    def check(self, sample: Sample, history: History) -> list[Finding]:
        """Return where the rule holds; `history` already has this sample."""


    def recovered(self, said: AlarmRecord, sample: Sample, history: History) -> bool:
        """Return whether an alarm that stands and is not found any more is over.

        False where this sample can't tell, as in the first steps after a resume, and while the value is still on the
        bad side of its limit: not every rule finds again what it has raised.
        """
        return True


def value_at(said: AlarmRecord, sample: Sample, metric: str = "") -> float:
    """Return the value of an alarm's metric (or of another) at its layer, NaN where this sample has none."""
    values = sample.values.get(metric or said.metric)
    if values is None or said.layer not in sample.layers:
        return math.nan
    return float(values[sample.layers.index(said.layer)])


def where(condition: NDArray[np.bool_]) -> list[int]:
    """Return the places of the layers at which a condition holds, as plain ints."""
    return [int(at) for at in np.flatnonzero(condition)]
