"""From reduced sums to the sink: metrics, frames and alarms, on the writing rank. NumPy only, off the critical path.

What fails here is said once and the rest of the run trains on without numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_ext.observe import emit, formulas
from megatron_ext.observe.names import step_key
from megatron_ext.observe.options import AlarmOptions, ObserveOptions
from megatron_ext.observe.sample import Facts, InvariantError, Sample, measure
from megatron_ext.observe.sink import Sink
from megatron_ext.observe.store import Store

logger = logging.getLogger("megatron_ext.observe")

# Up to this many ranks, each one's memory is sent.
RANKS_SHOWN = 64


@dataclass(frozen=True)
class _Stretch:
    """Counts int64 [L, E] of the steps after `start` up to `end`."""

    start: int
    end: int
    counts: NDArray[np.int64]


class Publisher:
    """Takes one reduced vector a sampled step.

    Args:
        options: What is measured and kept.
        alarms: The thresholds.
        sink: Where it goes.
        layers: Global numbers of the MoE layers.
        facts: What of the configuration the numbers depend on.
        store: Knows how the vector is laid out.
    """

    def __init__(
        self,
        *,
        options: ObserveOptions,
        alarms: AlarmOptions,
        sink: Sink,
        layers: tuple[int, ...],
        facts: Facts,
        store: Store,
    ) -> None:
        """Start with an empty window."""
        self._options = options
        self._sink = sink
        self._layers = layers
        self._facts = facts
        self._store = store
        self._broken = False
        width = 2 + len(facts.sources)
        self._thinning = emit.Thinning(
            interval=options.interval,
            budget_bytes=options.routing_bytes,
            numbers_a_frame=len(layers) * store.shape.experts * width,
        )
        self._window: list[_Stretch] = []

    def take(self, step: int, packed: NDArray[np.float64], clock: Mapping[str, float]) -> None:
        """Publish the sample of `step`."""
        if self._broken:
            return
        try:
            self._take(step, self._store.unpack(packed), clock)
        except InvariantError as error:
            self._stop(f"the counts are wrong ({error}); no metrics rather than wrong ones")
        except Exception as error:
            self._stop(f"{type(error).__name__}: {error}")

    def _take(self, step: int, sums: Mapping[str, NDArray], clock: Mapping[str, float]) -> None:
        step_values = {**clock, **_memory(sums["memory"])}
        if self._layers:
            sample = measure(step, self._layers, sums, self._facts)
            sample = self._with_window(replace(sample, step_values=step_values))
            if self._thinning.keeps(step):
                self._sink.routing(
                    step, sample.layers, sample.tokens_per_expert, emit.extra_of(sample, self._facts.sources)
                )
        else:
            empty = np.zeros((0, 0), np.int64)
            sample = Sample(step, (), empty, empty, {}, step_values=step_values)
        self._sink.scalars(step, emit.scalars(sample, layers=self._options.layers, alarmed={}))

    def _with_window(self, sample: Sample) -> Sample:
        """Add `dead_share` over the last `window` steps; no value before so many were counted."""
        since = self._window[-1].end if self._window else sample.step - 1
        self._window.append(_Stretch(since, sample.step, sample.window_counts))
        while len(self._window) > 1 and sample.step - self._window[1].start >= self._options.window:
            del self._window[0]
        if sample.step - self._window[0].start < self._options.window:
            return sample
        counts = np.sum([stretch.counts for stretch in self._window], axis=0)
        values = {**sample.values, "dead_share": formulas.dead_share(counts)}
        return replace(sample, window_counts=counts, values=values)

    def _stop(self, why: str) -> None:
        self._broken = True
        logger.warning("observe: measuring stops, training goes on: %s", why)


def _memory(peaks: NDArray[np.int64]) -> dict[str, float]:
    values = {
        step_key("peak_memory", "max"): float(peaks.max()),
        step_key("peak_memory", "min"): float(peaks.min()),
        step_key("peak_memory", "mean"): float(peaks.mean()),
        step_key("peak_memory", "max_rank"): float(peaks.argmax()),
    }
    if peaks.size <= RANKS_SHOWN:
        values |= {step_key("peak_memory", f"rank_{rank}"): float(peak) for rank, peak in enumerate(peaks)}
    return values
