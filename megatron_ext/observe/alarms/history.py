"""What the rules remember: the watched metrics of the last steps, and the loss. It survives a resume as JSON.

A job that is killed goes on from its last checkpoint, which may be older than what was remembered: whatever came from
that step on is forgotten, since those steps are run again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.observe import formulas
from megatron_ext.observe.sample import Sample

# The longest look back of any rule, in steps.
SPAN = 100
# Losses kept: enough for a fair estimate of their noise.
LOSSES = 64

Values = NDArray[np.float64]


class History:
    """Series of [L] values by metric, newest last, and the losses of the last steps.

    Args:
        metrics: The per-layer metrics to keep.
        layers: Number of MoE layers, L.
    """

    def __init__(self, metrics: Sequence[str], layers: int) -> None:
        """Start empty."""
        self._layers = layers
        self._series: dict[str, list[tuple[int, Values]]] = {metric: [] for metric in metrics}
        self.losses: list[tuple[int, float]] = []
        # Those that were NaN or infinite.
        self.broken: list[tuple[int, float]] = []
        self.throughput: list[tuple[int, float]] = []
        # Each time the loss went below everything before: the last is the lowest so far.
        self.lows: list[tuple[int, float]] = []
        # The steps of the newest sample and of the one before it.
        self.newest = self.previous = 0

    def add(self, sample: Sample) -> None:
        """Take a sample; a metric without values at this step is left out."""
        self.previous, self.newest = self.newest, sample.step
        for metric, series in self._series.items():
            values = sample.values.get(metric)
            if values is not None:
                series.append((sample.step, values))
                # One sample older than the span stays: "100 steps ago" lies between two.
                while len(series) > 2 and series[1][0] <= sample.step - SPAN:
                    del series[0]

    def add_loss(self, step: int, loss: float) -> None:
        """Take a step's loss; one that isn't finite is noted apart (Megatron stops there unless told not to)."""
        if not math.isfinite(loss):
            self.broken = [*self.broken[1 - LOSSES :], (step, loss)]
            return
        self.losses = [*self.losses[1 - LOSSES :], (step, loss)]
        if not self.lows or loss < self.lows[-1][1]:
            self.lows = [*self.lows[1 - LOSSES :], (step, loss)]

    def add_throughput(self, step: int, tokens_per_s: float) -> None:
        """Take the throughput since the last sample."""
        self.throughput = [*self.throughput[1 - LOSSES :], (step, tokens_per_s)]

    def series(self, metric: str) -> list[tuple[int, Values]]:
        """Return (step, [L]) pairs, oldest first."""
        return self._series[metric]

    def ago(self, metric: str, step: int, steps: int) -> tuple[int, Values] | None:
        """Return the newest pair at least `steps` before `step`, else the oldest before `step`, None without."""
        before = [pair for pair in self._series[metric] if pair[0] < step]
        old = [pair for pair in before if pair[0] <= step - steps]
        return old[-1] if old else (before[0] if before else None)

    def held(self, conditions: Sequence[tuple[int, NDArray[np.bool_]]], step: int, steps: int) -> list[int | None]:
        """Return for each layer the step since which a condition holds, None where for less than `steps`.

        Args:
            conditions: (step, bool [L]) pairs, oldest first, up to `step`.
            step: Now.
            steps: How long it has to hold.
        """
        since: list[int | None] = [None] * self._layers
        for at, holds in conditions:
            since = [(now if now is not None else at) if held else None for now, held in zip(since, holds, strict=True)]
        return [now if now is not None and step - now >= steps else None for now in since]

    def forget_from(self, step: int) -> None:
        """Drop what came at `step` or later."""
        self.newest = min(self.newest, step - 1)
        for metric, series in self._series.items():
            self._series[metric] = [pair for pair in series if pair[0] < step]
        self.losses = [pair for pair in self.losses if pair[0] < step]
        self.broken = [pair for pair in self.broken if pair[0] < step]
        self.lows = [pair for pair in self.lows if pair[0] < step]
        self.throughput = [pair for pair in self.throughput if pair[0] < step]

    def as_json(self) -> dict[str, Any]:
        """Return plain values; four digits are enough for thresholds."""
        return {
            "layers": self._layers,
            "series": {
                metric: [
                    [step, values]
                    for (step, _), values in zip(
                        series, formulas.shortened(np.array([values for _, values in series])), strict=True
                    )
                ]
                for metric, series in self._series.items()
            },
            "newest": self.newest,
            "losses": [list(pair) for pair in self.losses],
            "broken": [[step, str(loss)] for step, loss in self.broken],
            "lows": [list(pair) for pair in self.lows],
            "throughput": [list(pair) for pair in self.throughput],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `as_json` gave; a state of another model (other layers) is ignored."""
        if state.get("layers") != self._layers:
            return
        for metric, pairs in state["series"].items():
            if metric in self._series:
                self._series[metric] = [(int(step), np.array(values, np.float64)) for step, values in pairs]
        # A state from before it was kept: the newest loss is no older than the newest sample.
        self.newest = int(state.get("newest", state["losses"][-1][0] if state["losses"] else 0))
        self.losses = [(int(step), float(loss)) for step, loss in state["losses"]]
        self.broken = [(int(step), float(loss)) for step, loss in state.get("broken", ())]
        self.lows = [(int(step), float(loss)) for step, loss in state["lows"]]
        self.throughput = [(int(step), float(value)) for step, value in state["throughput"]]
