"""An overloaded rank: the others of its expert-parallel group wait for it in every micro-batch."""

from __future__ import annotations

from megatron_ext.observe.alarms.history import History
from megatron_ext.observe.alarms.rule import Finding, Rule, value_at
from megatron_ext.observe.sample import Sample
from megatron_ext.observe.sink import AlarmRecord


class OverloadedRank(Rule):
    """`rank_max_vio` over 0.5 for 20 steps."""

    name = "overloaded_rank"
    watches = ("rank_max_vio",)

    def check(self, sample: Sample, history: History) -> list[Finding]:
        """Return the layers whose busiest rank is overloaded, with that rank."""
        if "rank_max_vio" not in sample.values or sample.busiest_rank is None:
            return []
        limit = self.options.rank_vio
        conditions = [(at, vio > limit) for at, vio in history.series("rank_max_vio")]
        held = history.held(conditions, sample.step, self.options.rank_steps)
        return [
            Finding(
                metric="rank_max_vio",
                value=float(sample.values["rank_max_vio"][at]),
                limit=limit,
                since=since,
                layer=layer,
                rank=int(sample.busiest_rank[at]),
            )
            for at, (layer, since) in enumerate(zip(sample.layers, held, strict=True))
            if since is not None
        ]

    def recovered(self, said: AlarmRecord, sample: Sample, history: History) -> bool:
        """Return whether the ranks are even again."""
        return value_at(said, sample) <= said.limit
