"""Where the monitor's numbers go: the Protocol that a writer satisfies (`tracking.RunWriter` does).

The monitor gives names and numbers and never knows files or trackers. Only the writing rank has a sink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

RAISED = "raised"
CHANGED = "changed"
CLEARED = "cleared"


def alarm_key(record: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what makes two records be about one alarm: its name and layer. Expert and rank may change in its life."""
    return record.get("name"), record.get("layer")


@runtime_checkable
class Sink(Protocol):
    """A writer of one run. No method may raise into the training loop or block it."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take metrics of a step; the keys are those of `names.py`. Several calls for one step add up."""

    def routing(
        self,
        step: int,
        layers: Sequence[int],
        tokens_per_expert: NDArray[np.int64],
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Take a frame for `routing.jsonl`. The monitor has already thinned: every call is to be written.

        Args:
            step: The training step.
            layers: Global layer numbers from 0, as many as rows.
            tokens_per_expert: int64 [layers, experts], over all ranks and micro-batches of the step.
            extra: More fields of the same line, ready for JSON: `expert_rms`, `sources`, `tokens_per_source`
                (shapes in docs/architecture.md).
        """

    def alarm(self, record: Mapping[str, object]) -> None:
        """Take a change of an alarm: `AlarmRecord.as_json()`."""

    def earlier_alarms(self) -> Sequence[Mapping[str, Any]]:
        """Return what `alarm` took in earlier starts of this run, in order, without steps that were run again."""

    def last(self, key: str) -> tuple[int, float] | None:
        """Return step and value of a scalar as last written, Megatron's by its own tag (`lm loss`); None if never."""

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Keep the alarms' state for a resumed run (ready for JSON, under 1 MB); replaces the last one."""

    def load_state(self) -> Mapping[str, Any] | None:
        """Return what `save_state` kept last, None if nothing or unreadable."""


@dataclass(frozen=True)
class AlarmRecord:
    """One line of `alarms.jsonl`: an alarm was raised, changed (got clearly worse) or cleared.

    Attributes:
        name: A name of `names.ALARMS`.
        state: `raised`, `changed` or `cleared`.
        step: The step of this line.
        since_step: The step at which it was raised.
        layer: Global layer number from 0; None for an alarm of the whole step.
        expert: The expert it is about, None where it is about the whole layer.
        rank: The expert-parallel rank it is about, None where there is none.
        metric: The measure whose value is given.
        value: Its value at `step`.
        limit: The threshold that it crossed.
        why: Why it matters, a sentence.
        remedy: The first thing to try.
        link: Page and anchor of the docs.
    """

    name: str
    state: str
    step: int
    since_step: int
    layer: int | None
    expert: int | None
    rank: int | None
    metric: str
    value: float
    limit: float
    why: str
    remedy: str
    link: str

    def as_json(self) -> dict[str, object]:
        """Return the record as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> AlarmRecord:
        """Take back a line of `alarms.jsonl`, which has more fields.

        Raises:
            KeyError, TypeError, ValueError: It isn't one.
        """
        values = {item.name: plain[item.name] for item in fields(cls)}
        return cls(**{**values, "value": float(values["value"]), "limit": float(values["limit"])})

    @property
    def where(self) -> str:
        """Return "layer 3, expert 7", "" for an alarm of the whole step."""
        named = (("layer", self.layer), ("expert", self.expert), ("EP rank", self.rank))
        return ", ".join(f"{word} {number}" for word, number in named if number is not None)

    def line(self) -> str:
        """Return the one line of the log."""
        place = f" at {self.where}" if self.where else ""
        if self.state == CLEARED:
            return f"alarm {self.name}{place} cleared at step {self.step} ({self.metric} {self.value:.4g})"
        return (
            f"ALARM {self.name}{place}: {self.metric} {self.value:.4g} (limit {self.limit:.4g}) at step "
            f"{self.step}, since step {self.since_step}. {self.why} Try: {self.remedy}. See {self.link}"
        )
