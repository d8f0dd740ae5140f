"""The step's own clock: time, throughput and cost from the moments at which steps end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from megatron_ext.observe.names import step_key


class StepClock:
    """Measures the steps between two samples.

    The median leaves out steps that an evaluation or a checkpoint made long; GPU hours count them all.
    """

    def __init__(self, *, world: int, now: Callable[[], float] = time.monotonic) -> None:
        """Start before the first step; `now` gives seconds."""
        self._world = world
        self._now = now
        self._last: float | None = None
        self._steps: list[float] = []
        self.gpu_hours = 0.0

    def tick(self) -> None:
        """Note that a step has ended. The first one only starts the clock: its time is start-up."""
        now = self._now()
        if self._last is not None:
            self._steps.append(now - self._last)
            self.gpu_hours += (now - self._last) * self._world / 3600.0
        self._last = now

    def values(self, tokens_per_step: int) -> dict[str, float]:
        """Return step metrics since the last call and begin anew; empty before a whole step was seen."""
        if not self._steps:
            return {}
        seconds = statistics.median(self._steps)
        self._steps.clear()
        values = {step_key("step_time"): seconds, step_key("gpu_hours"): self.gpu_hours}
        if seconds > 0 and tokens_per_step:
            values[step_key("tokens_per_s")] = tokens_per_step / seconds
        return values
