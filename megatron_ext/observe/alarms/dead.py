"""Dead experts: no token in the window, or tokens but no output."""

from __future__ import annotations

import numpy as np

from megatron_ext.observe.alarms.history import History
from megatron_ext.observe.alarms.rule import Finding, Rule, value_at
from megatron_ext.observe.sample import Sample
from megatron_ext.observe.sink import AlarmRecord


class DeadExpert(Rule):
    """An expert without a token in the window, or whose output is under 0.05 of the layer's median."""

    name = "dead_expert"

    def check(self, sample: Sample, history: History) -> list[Finding]:
        """Return one finding a layer: the first expert without a token, else the one without output."""
        findings = []
        window_is_full = "dead_share" in sample.values
        for at, layer in enumerate(sample.layers):
            found = self._no_tokens(sample, at, layer) if window_is_full else None
            found = found or self._no_output(sample, at, layer)
            if found:
                findings.append(found)
        return findings

    def recovered(self, said: AlarmRecord, sample: Sample, history: History) -> bool:
        """Return whether all experts got tokens in a full window, or the silent one speaks again."""
        if said.metric == "dead_share":
            return value_at(said, sample) == 0
        return value_at(said, sample) >= said.limit

    def _no_tokens(self, sample: Sample, at: int, layer: int) -> Finding | None:
        dead = np.flatnonzero(sample.window_counts[at] == 0)
        if not dead.size:
            return None
        others = f" ({dead.size} of {sample.num_experts} experts)" if dead.size > 1 else ""
        return Finding(
            metric="dead_share",
            value=float(sample.values["dead_share"][at]),
            limit=0.0,
            since=sample.step,
            layer=layer,
            expert=int(dead[0]),
            why=f"It gets no tokens{others}, so it learns nothing and its parameters are lost.",
        )

    def _no_output(self, sample: Sample, at: int, layer: int) -> Finding | None:
        ratios = sample.values.get("expert_norm_min_over_median")
        if ratios is None or sample.expert_rms is None or not ratios[at] < self.options.dead_norm:
            return None
        return Finding(
            metric="expert_norm_min_over_median",
            value=float(ratios[at]),
            limit=self.options.dead_norm,
            since=sample.step,
            layer=layer,
            expert=int(np.nanargmin(sample.expert_rms[at])),
            why="It gets tokens but says next to nothing; its parameters are lost.",
        )
