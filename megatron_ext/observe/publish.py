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
from megatron_ext.observe.alarms import RULES, Board, History
from megatron_ext.observe.names import METRICS, step_key
from megatron_ext.observe.options import AlarmOptions, ObserveOptions
from megatron_ext.observe.probes import PROBES
from megatron_ext.observe.sample import Facts, InvariantError, Sample, measure
from megatron_ext.observe.sink import Sink
from megatron_ext.observe.store import Store

logger = logging.getLogger("megatron_ext.observe")

# Up to this many ranks, each one's memory is sent.
RANKS_SHOWN = 64
# The alarms' memory is saved with a checkpoint, when an alarm changes, and otherwise this rarely.
STATE_EVERY_STEPS = 20
STATE_SCHEMA = 1
_LOSS = METRICS["lm_loss"].megatron_tag


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
        self._alarms = alarms
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
        self._rules = tuple(rule(alarms) for rule in RULES)
        watched = dict.fromkeys(metric for rule in RULES for metric in rule.watches)
        self._history = History(tuple(watched), len(layers))
        self._board = Board()
        self._saved_at = 0
        self._first = True

    def note_loss(self, step: int) -> None:
        """Remember the loss that Megatron has just written for `step`."""
        written = self._sink.last(_LOSS)
        # With --tensorboard-log-interval Megatron leaves steps out: the last value is then an older step's.
        if written is not None and written[0] == step and not self._broken:
            self._resume(step)
            self._history.add_loss(step, written[1])

    def take(self, step: int, packed: NDArray[np.float64], clock: Mapping[str, float]) -> None:
        """Publish the sample of `step`."""
        if self._broken:
            return
        try:
            self._resume(step)
            self._take(step, self._store.unpack(packed), clock)
        except InvariantError as error:
            self._stop(f"the counts are wrong ({error}); no metrics rather than wrong ones")
        except Exception as error:
            self._stop(f"{type(error).__name__}: {error}")

    def keep_memory(self) -> None:
        """Have what the alarms remember kept: a run that resumes from here then judges as this one would have."""
        if self._first or self._broken:
            return
        self._saved_at = self._history.newest
        self._sink.save_state({"schema": STATE_SCHEMA, "history": self._history.as_json()})

    def _take(self, step: int, sums: Mapping[str, NDArray], clock: Mapping[str, float]) -> None:
        step_values = {**clock, **_memory(sums["memory"])}
        control = self._alarms.control_tokens_per_s
        throughput = clock.get(step_key("tokens_per_s"))
        if control and throughput:
            step_values[step_key("forced_even_ratio")] = throughput / control
        self._note_failures(sums["failed"])
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
        self._alarm(sample)
        alarmed = self._board.layers_by_metric()
        values = emit.scalars(sample, layers=self._options.layers, alarmed=alarmed)
        self._sink.scalars(step, values | {step_key("alarms"): float(self._board.standing)})

    def _alarm(self, sample: Sample) -> None:
        self._history.add(sample)
        throughput = sample.step_values.get(step_key("tokens_per_s"))
        if throughput is not None:
            self._history.add_throughput(sample.step, throughput)
        findings = [(rule.name, found) for rule in self._rules for found in rule.check(sample, self._history)]
        rules = {rule.name: rule for rule in self._rules}
        news = self._board.update(
            sample.step, findings, lambda said: rules[said.name].recovered(said, sample, self._history)
        )
        for record in news:
            logger.warning(record.line())
            self._sink.alarm(record.as_json())
        if news or sample.step - self._saved_at >= STATE_EVERY_STEPS:
            self.keep_memory()

    def _resume(self, step: int) -> None:
        """Before the first step: take over what an earlier start of this run remembered of the steps before it."""
        if not self._first:
            return
        self._first = False
        ours = {rule.name for rule in self._rules}
        # What stands is what the record says: the memory below may be older than that, or of a time after `step`.
        earlier = [one for one in self._sink.earlier_alarms() if one.get("name") in ours]
        self._board.restore(one for one in earlier if (one.get("step") or 0) < step)
        state = self._sink.load_state()
        if not state or state.get("schema") != STATE_SCHEMA:
            return
        try:
            self._history.restore(state["history"])
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("observe: the alarms' memory can't be read, they need some steps anew: %r", error)
        self._history.forget_from(step)

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

    def _note_failures(self, failed: NDArray[np.int64]) -> None:
        """Leave out what a probe that is off on some rank would have measured: a sum without it is wrong."""
        lost = {metric for kind, ranks in zip(PROBES, failed, strict=True) if ranks for metric in kind.measures}
        if not lost <= self._facts.lost:
            self._facts = replace(self._facts, lost=self._facts.lost | lost)

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
