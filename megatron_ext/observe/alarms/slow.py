"""A step slower than the forced-even control, and whether imbalance or transport is to blame."""

from __future__ import annotations

import numpy as np

from megatron_ext.observe.alarms.history import History
from megatron_ext.observe.alarms.rule import Finding, Rule
from megatron_ext.observe.sample import Sample
from megatron_ext.observe.sink import AlarmRecord

_SAMPLES = 3


class SlowStep(Rule):
    """Throughput under 85 % of the forced-even control's for three samples in a row."""

    name = "slow_step"

    def check(self, sample: Sample, history: History) -> list[Finding]:
        """Return at most one finding."""
        control = self.options.control_tokens_per_s
        last = history.throughput[-_SAMPLES:]
        if not control or len(last) < _SAMPLES or any(value / control >= self.options.slow_ratio for _, value in last):
            return []
        ratio = last[-1][1] / control
        return [
            Finding(
                metric="forced_even_ratio",
                value=ratio,
                limit=self.options.slow_ratio,
                since=last[0][0],
                why=_blame(sample, ratio),
            )
        ]

    def recovered(self, said: AlarmRecord, sample: Sample, history: History) -> bool:
        """Return whether there are enough samples to tell."""
        return len(history.throughput) >= _SAMPLES


def _blame(sample: Sample, ratio: float) -> str:
    """Say which: a busiest rank of (1 + vio) times the mean can make the step that much longer at most."""
    vio = sample.values.get("rank_max_vio")
    worst = float(np.nanmean(vio)) if vio is not None and np.isfinite(vio).any() else 0.0
    if worst >= 1 / ratio - 1:
        return f"Imbalance explains it: the busiest rank gets {1 + worst:.2f} times the mean (rank_max_vio)."
    return f"Imbalance doesn't explain it (rank_max_vio {worst:.2f}): look at the transport."
