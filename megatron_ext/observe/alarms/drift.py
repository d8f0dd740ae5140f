"""Logits that drift up until bf16 rounding chooses the experts."""

from __future__ import annotations

import math

import numpy as np

from megatron_ext.observe.alarms.history import SPAN, History
from megatron_ext.observe.alarms.rule import Finding, Rule, value_at, where
from megatron_ext.observe.sample import Sample
from megatron_ext.observe.sink import AlarmRecord

# Logits around 0 give a logsumexp of log E; growth below this multiple of it is a router that learns.
_FLOOR = 1.5
# A growth needs some steps to be called a drift.
_LEAST_STEPS = 20


class LogitDrift(Rule):
    """`flip_rate` over 1 %, or `z_rms` of a bf16 router 1.25 times its value 100 steps ago, and well above log E."""

    name = "logit_drift"
    watches = ("z_rms", "flip_rate")

    def check(self, sample: Sample, history: History) -> list[Finding]:
        """Return the drifting layers."""
        if sample.router_is_fp32:
            return []
        found = {finding.layer: finding for finding in [*self._drifts(sample, history), *self._flips(sample, history)]}
        return list(found.values())

    def _flips(self, sample: Sample, history: History) -> list[Finding]:
        flips = sample.values.get("flip_rate")
        last = history.series("flip_rate")[-2:]
        if flips is None or len(last) < 2:
            return []
        # Among few tokens a share of a few flips is chance: 3 standard deviations of a count of that size on top.
        tokens = np.maximum(sample.tokens_per_expert.sum(-1) / sample.topk, 1.0)
        limit = self.options.drift_flips + 3.0 * np.sqrt(self.options.drift_flips / tokens)
        return [
            Finding(
                metric="flip_rate",
                value=float(flips[at]),
                limit=float(limit[at]),
                since=last[0][0],
                layer=sample.layers[at],
            )
            for at in where((flips > limit) & (last[0][1] > limit))
        ]

    def _drifts(self, sample: Sample, history: History) -> list[Finding]:
        z, before = sample.values.get("z_rms"), history.ago("z_rms", sample.step, SPAN)
        if z is None or before is None or sample.step - before[0] < _LEAST_STEPS:
            return []
        limit = self.options.drift_growth * before[1]
        rising = (z >= limit) & (z > _FLOOR * math.log(sample.num_experts))
        for _, earlier in history.series("z_rms")[-3:-1]:
            rising &= z > earlier
        return [
            Finding(
                metric="z_rms", value=float(z[at]), limit=float(limit[at]), since=before[0], layer=sample.layers[at]
            )
            for at in where(rising)
        ]

    def recovered(self, said: AlarmRecord, sample: Sample, history: History) -> bool:
        """Return whether the flips are few again, or the logits no longer much above those of 100 steps ago."""
        if said.metric == "flip_rate":
            return value_at(said, sample) <= said.limit
        before = history.ago("z_rms", sample.step, SPAN)
        if before is None or sample.step - before[0] < _LEAST_STEPS or said.layer not in sample.layers:
            return False
        earlier = float(before[1][sample.layers.index(said.layer)])
        return value_at(said, sample) < self.options.drift_growth * earlier
