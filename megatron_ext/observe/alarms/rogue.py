"""A rogue expert: one output grows away from the others while the loss is still flat."""

from __future__ import annotations

import numpy as np

from megatron_ext.observe.alarms.history import SPAN, History
from megatron_ext.observe.alarms.rule import Finding, Rule, value_at, where
from megatron_ext.observe.sample import Sample
from megatron_ext.observe.sink import AlarmRecord

_METRIC = "expert_norm_max_over_median"


class RogueExpert(Rule):
    """`expert_norm_max_over_median` over 10 and twice its value 100 steps ago (or the oldest known since)."""

    name = "rogue_expert"
    watches = (_METRIC,)

    def check(self, sample: Sample, history: History) -> list[Finding]:
        """Return the layers with a rogue expert."""
        ratio, before = sample.values.get(_METRIC), history.ago(_METRIC, sample.step, SPAN)
        if ratio is None or before is None or sample.expert_rms is None:
            return []
        rogue = (ratio > self.options.rogue_norm) & (ratio >= self.options.rogue_growth * before[1])
        return [
            Finding(
                metric=_METRIC,
                value=float(ratio[at]),
                limit=self.options.rogue_norm,
                since=self._since(history, at, sample.step),
                layer=sample.layers[at],
                expert=int(np.nanargmax(sample.expert_rms[at])),
            )
            for at in where(rogue)
        ]

    def recovered(self, said: AlarmRecord, sample: Sample, history: History) -> bool:
        """Return whether its output is back among the others': one that only stopped growing stands."""
        return value_at(said, sample) <= said.limit

    def _since(self, history: History, at: int, step: int) -> int:
        """Return the first of the last steps in a row at which the ratio was over the limit."""
        since = step
        for earlier, ratio in reversed(history.series(_METRIC)):
            if not ratio[at] > self.options.rogue_norm:
                break
            since = earlier
        return since
