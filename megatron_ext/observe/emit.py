"""From a sample to tracker keys and routing frames: which layers' values go out, and how often a frame is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from megatron_ext.observe import formulas, names
from megatron_ext.observe.formulas import Floats
from megatron_ext.observe.sample import Sample

# With `auto`, models up to this many MoE layers send every layer's value.
ALL_LAYERS_UP_TO = 8
# A decimal digit and a separator or so for each count of a frame.
_BYTES_A_COUNT = 6
# Frames kept at full rate before the stride doubles, where the byte budget allows no more.
_LEAST_FRAMES = 8


def scalars(sample: Sample, *, layers: str, alarmed: Mapping[str, Iterable[int]]) -> dict[str, float]:
    """Return the tracker's keys and values of a sample.

    Args:
        sample: The sample.
        layers: `all`, `extremes` or `auto` (`ObserveOptions.layers`).
        alarmed: Metric -> global layer numbers whose own value is wanted whatever `layers` says.
    """
    every = layers == "all" or (layers == "auto" and len(sample.layers) <= ALL_LAYERS_UP_TO)
    out: dict[str, float] = {}
    # All metrics at once: this runs beside training, in the same interpreter.
    table = np.array(list(sample.values.values()))
    for metric, values, extremes in zip(sample.values, table.tolist(), _extremes(table), strict=True):
        out |= _aggregates(metric, values, extremes, sample.layers)
        shown = sample.layers if every else set(alarmed.get(metric, ()))
        for layer, value in zip(sample.layers, values, strict=True) if shown else ():
            if layer in shown and math.isfinite(value):
                out[names.layer_key(metric, layer)] = value
    return out | dict(sample.step_values)


def _extremes(table: Floats) -> list[tuple[int, int, float]]:
    """Return for each row of [M, L] where its largest and its smallest value are, and its mean; NaN is left out."""
    if not table.size:
        return []
    seen = np.isfinite(table)
    highest = np.where(seen, table, -np.inf).argmax(-1)
    lowest = np.where(seen, table, np.inf).argmin(-1)
    mean = formulas.mean_over(np.where(seen, table, 0.0).sum(-1), seen.sum(-1))
    return list(zip(highest.tolist(), lowest.tolist(), mean.tolist(), strict=True))


def _aggregates(
    metric: str, values: list[float], extremes: tuple[int, int, float], layers: tuple[int, ...]
) -> dict[str, float]:
    highest, lowest, mean = extremes
    if not math.isfinite(mean):
        return {}
    out = {
        names.aggregate_key(metric, "max"): values[highest],
        names.aggregate_key(metric, "min"): values[lowest],
        names.aggregate_key(metric, "mean"): mean,
    }
    worse = names.METRICS[metric].worse
    if worse in (names.Worse.UP, names.Worse.EITHER):
        out[names.aggregate_key(metric, "max_layer")] = float(layers[highest])
    if worse in (names.Worse.DOWN, names.Worse.EITHER):
        out[names.aggregate_key(metric, "min_layer")] = float(layers[lowest])
    return out


def extra_of(sample: Sample, sources: tuple[str, ...]) -> dict[str, Any]:
    """Return the further fields of a routing frame, ready for JSON (docs/architecture.md)."""
    extra: dict[str, Any] = {}
    if sample.expert_rms is not None:
        extra["expert_rms"] = formulas.shortened(sample.expert_rms)
    if sample.tokens_per_source is not None:
        extra["sources"] = list(sources)
        extra["tokens_per_source"] = sample.tokens_per_source.tolist()
    return extra


class Thinning:
    """Decides which sampled steps leave a frame, so that the file stays near a byte budget however long the run.

    Up to a number of frames every sample is kept; from there the stride doubles each time the run has doubled. The
    decision depends on the step alone: a resumed run keeps the same steps, and kept frames need no rewriting. After n
    doublings the file holds 1 + n/2 times the frames of the first stretch, so the budget is divided for 12 of them.
    """

    def __init__(self, *, interval: int, budget_bytes: int, numbers_a_frame: int) -> None:
        """Take the sampling interval in steps, and what a frame costs."""
        frame_bytes = max(numbers_a_frame, 1) * _BYTES_A_COUNT
        self._interval = max(interval, 1)
        self._frames = max(_LEAST_FRAMES, budget_bytes // (7 * frame_bytes))

    def keeps(self, step: int) -> bool:
        """Return whether the sample of `step` leaves a frame."""
        samples = step // self._interval
        doublings = max(0, (max(samples, 1) - 1) // self._frames).bit_length()
        return samples % (1 << doublings) == 0
