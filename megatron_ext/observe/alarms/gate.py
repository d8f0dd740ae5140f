"""A gate that doesn't gate: all chosen experts count alike, or only the first does."""

from __future__ import annotations

from megatron_ext.observe.alarms.history import History
from megatron_ext.observe.alarms.rule import Finding, Rule, value_at
from megatron_ext.observe.sample import Sample
from megatron_ext.observe.sink import AlarmRecord

# Long enough to leave out a router that has only just been initialized.
_STEPS = 20


class FlatGate(Rule):
    """`max1_over_max2` under 1.05 for 20 steps."""

    name = "flat_gate"
    watches = ("max1_over_max2",)

    def check(self, sample: Sample, history: History) -> list[Finding]:
        """Return the layers with a flat gate."""
        limit = self.options.flat_ratio
        conditions = [(at, ratio < limit) for at, ratio in history.series("max1_over_max2")]
        return _held(sample, "max1_over_max2", limit, history.held(conditions, sample.step, _STEPS))

    def recovered(self, said: AlarmRecord, sample: Sample, history: History) -> bool:
        """Return whether the chosen experts differ again."""
        return value_at(said, sample) >= said.limit


class SharpGate(Rule):
    """`top_weight` over 0.95 for 20 steps."""

    name = "sharp_gate"
    watches = ("top_weight",)

    def check(self, sample: Sample, history: History) -> list[Finding]:
        """Return the layers with a sharp gate."""
        limit = self.options.sharp_weight
        conditions = [(at, weight > limit) for at, weight in history.series("top_weight")]
        return _held(sample, "top_weight", limit, history.held(conditions, sample.step, _STEPS))

    def recovered(self, said: AlarmRecord, sample: Sample, history: History) -> bool:
        """Return whether the others count again."""
        return value_at(said, sample) <= said.limit


def _held(sample: Sample, metric: str, limit: float, held: list[int | None]) -> list[Finding]:
    if metric not in sample.values:
        return []
    return [
        Finding(metric=metric, value=float(sample.values[metric][at]), limit=limit, since=since, layer=layer)
        for at, (layer, since) in enumerate(zip(sample.layers, held, strict=True))
        if since is not None
    ]
