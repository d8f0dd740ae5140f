"""Routing collapse: a few experts get most tokens, and it isn't getting better."""

from __future__ import annotations

from megatron_ext.observe.alarms.history import History
from megatron_ext.observe.alarms.rule import Finding, Rule, value_at
from megatron_ext.observe.sample import Sample
from megatron_ext.observe.sink import AlarmRecord

# A fall by less than this is flat.
_FLAT = 0.95


class RoutingCollapse(Rule):
    """`max_vio` of the global batch over half of its limit E/k - 1 for 20 steps, and rising or flat."""

    name = "routing_collapse"
    watches = ("max_vio",)

    def check(self, sample: Sample, history: History) -> list[Finding]:
        """Return the collapsed layers, each with its busiest expert."""
        limit = self.options.collapse_limit * (sample.num_experts / sample.topk - 1)
        if limit <= 0 or "max_vio" not in sample.values:
            return []
        series = history.series("max_vio")
        held = history.held([(at, vio > limit) for at, vio in series], sample.step, self.options.collapse_steps)
        vio = sample.values["max_vio"]
        before = history.ago("max_vio", sample.step, self.options.collapse_steps)
        return [
            Finding(
                metric="max_vio",
                value=float(vio[at]),
                limit=limit,
                since=since,
                layer=layer,
                expert=int(sample.tokens_per_expert[at].argmax()),
            )
            for at, (layer, since) in enumerate(zip(sample.layers, held, strict=True))
            if since is not None and before is not None and vio[at] >= _FLAT * before[1][at]
        ]

    def recovered(self, said: AlarmRecord, sample: Sample, history: History) -> bool:
        """Return whether `max_vio` is back under its limit; while it falls towards it, the alarm stands."""
        return value_at(said, sample) <= said.limit
