"""A run as the report sees it: its label and colour, its x axis in steps and in tokens, and its series by meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_ext.observe.names import METRICS, aggregate_key, step_key
from megatron_ext.tracking.rundir import Run, RunInfo, read_run

# Distinct in brightness and hue on white and on near-black, also without red-green vision.
COLOURS = ("#2f7fd6", "#e07b00", "#1f9d6b", "#b455c8", "#d8434e", "#7d8b99", "#b09a00", "#00a3b8")
HELD_OUT = "lm loss validation"


@dataclass(frozen=True)
class Series:
    """One curve: steps int64 [N], tokens float64 [N] or None, values float64 [N], all finite."""

    steps: np.ndarray
    tokens: np.ndarray | None
    values: np.ndarray
    dropped: int = 0
    """Points left out because they were nan or infinite."""

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.values)

    def x(self, axis: str) -> np.ndarray:
        """Return the x values on `axis`, "step" or "tokens"."""
        if axis == "tokens":
            assert self.tokens is not None
            return self.tokens
        return self.steps


@dataclass(frozen=True)
class View:
    """A run with its label and colour in this report."""

    run: Run
    label: str
    colour: str

    @property
    def info(self) -> RunInfo:
        """run.json."""
        return self.run.info

    @cached_property
    def is_moe(self) -> bool:
        """Whether anything about experts was recorded."""
        return bool(self.run.routing) or any(key.startswith("moe/") for key in self.run.keys)

    @cached_property
    def tokens_per_sample(self) -> int | None:
        """Sequence length, from the configuration."""
        length = self.info.config.get("seq_length")
        return int(length) if isinstance(length, int) and length > 0 else None

    @cached_property
    def has_tokens(self) -> bool:
        """Whether steps can be turned into training tokens."""
        return self.tokens_per_sample is not None and any(row.samples is not None for row in self.run.rows)

    def tokens(self, steps: np.ndarray) -> np.ndarray | None:
        """Return the training tokens consumed at `steps`; None where the run did not log its samples."""
        if not self.has_tokens:
            return None
        known = [(row.step, row.samples) for row in self.run.rows if row.samples is not None]
        at, samples = np.array(known, dtype=np.float64).T
        return np.interp(steps, at, samples) * float(self.tokens_per_sample or 0)

    def series(self, key: str) -> Series:
        """Return one metric as a curve, without its nan and infinite points."""
        steps, values = self.run.series(key)
        good = np.isfinite(values)
        return Series(steps[good], self.tokens(steps[good]), values[good], int((~good).sum()))

    def loss(self) -> Series:
        """Training loss."""
        return self.series(METRICS["lm_loss"].megatron_tag)

    def held_out(self) -> Series:
        """Held-out loss."""
        return self.series(HELD_OUT)

    def max_vio(self, part: str = "max") -> Series:
        """MaxVio over the layers (`part`: max or mean), from the metrics, else from the routing frames."""
        logged = self.series(aggregate_key("max_vio", part))
        if len(logged) or not self.run.routing:
            return logged
        steps = np.array([frame.step for frame in self.run.routing], dtype=np.int64)
        each = [frame_max_vio(frame.counts) for frame in self.run.routing]
        values = np.array([vio.max() if part == "max" else vio.mean() for vio in each])
        return Series(steps, self.tokens(steps), values)

    def step_seconds(self) -> float | None:
        """Median time of a step, in seconds, first tenth left out (start-up); None if not logged."""
        times = self.series(METRICS["step_time"].megatron_tag).values
        if not len(times):
            times = self.series(step_key("step_time")).values
        return float(np.median(times[len(times) // 10 :])) if len(times) else None

    def own_tokens(self) -> float:
        """Training tokens of this run alone, without those of the checkpoint it started from; 0 where not logged."""
        ends = self.tokens(np.array([self.run.rows[-1].step])) if self.run.rows else None
        return 0.0 if ends is None else float(ends[0]) - self._start()[1]

    def from_start(self, series: Series) -> Series:
        """Return a curve with steps and tokens counted from where this run began."""
        steps, tokens = self._start()
        own = None if series.tokens is None else series.tokens - tokens
        return Series(series.steps - steps, own, series.values, series.dropped)

    def _start(self) -> tuple[int, float]:
        """Return steps and tokens before the run's first step: as many tokens before it as a step takes."""
        first, last = self.run.rows[0].step, self.run.rows[-1].step
        tokens = self.tokens(np.array([first, last]))
        if tokens is None or last == first:
            return first - 1, 0.0
        return first - 1, max(0.0, float(tokens[0]) - float(tokens[1] - tokens[0]) / (last - first))

    def gaps(self) -> list[tuple[int, int]]:
        """Return the stretches of steps, first and last, that have no row though there are some before and after."""
        steps = np.array([row.step for row in self.run.rows], dtype=np.int64)
        if len(steps) < 2:
            return []
        # Megatron logs every --tensorboard-log-interval steps; a run that doesn't say is judged by its own habit.
        logged = self.info.config.get("tensorboard_log_interval")
        usual = logged if isinstance(logged, int) and logged > 0 else int(np.median(np.diff(steps)))
        return [
            (int(before) + 1, int(after) - 1)
            for before, after in pairwise(steps)
            if after - before > usual
        ]

    def last_step(self) -> int:
        """The last step on record, 0 for none."""
        return self.run.rows[-1].step if self.run.rows else 0


def load_views(paths: Sequence[Path]) -> list[View]:
    """Read run directories; equal names get their folder in front.

    Raises:
        UserError: A directory is missing or holds no run.
    """
    runs = [read_run(path) for path in paths]
    names = [run.info.name for run in runs]
    views = []
    for index, run in enumerate(runs):
        label = run.info.name if names.count(run.info.name) == 1 else str(run.path)
        views.append(View(run, label, COLOURS[index % len(COLOURS)]))
    return views


def frame_max_vio(counts: np.ndarray) -> np.ndarray:
    """Return max(n_e) / mean(n_e) - 1 by layer, 0 without tokens; counts int64 [L, E] -> float64 [L]."""
    mean = counts.mean(axis=1)
    return np.where(mean > 0, counts.max(axis=1) / np.maximum(mean, 1e-12) - 1.0, 0.0)


def common_axis(views: Sequence[View]) -> str:
    """Return the axis on which the runs can be compared: tokens where all have them, else steps."""
    return "tokens" if views and all(view.has_tokens for view in views) else "step"


def ending(values: np.ndarray) -> float:
    """Return the mean of a curve's last twentieth (at least one point): less noise than the last point."""
    return float(values[-max(len(values) // 20, 1) :].mean())
