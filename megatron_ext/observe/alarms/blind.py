"""A load-balancing loss that reads even while the load is not."""

from __future__ import annotations

import numpy as np

from megatron_ext.observe.alarms.history import History
from megatron_ext.observe.alarms.rule import Finding, Rule, value_at
from megatron_ext.observe.sample import Sample
from megatron_ext.observe.sink import AlarmRecord

# Long enough to leave out the flat probabilities of a router that has only just been initialized.
_STEPS = 20


class BlindLoss(Rule):
    """`balance_loss` within 2 % of 1 while `max_vio` is over 1, for 20 steps."""

    name = "blind_loss"
    watches = ("balance_loss", "max_vio")

    def check(self, sample: Sample, history: History) -> list[Finding]:
        """Return the layers whose loss is blind."""
        if "balance_loss" not in sample.values:
            return []
        losses = dict(history.series("balance_loss"))
        conditions = [
            (at, (np.abs(losses[at] - 1) <= self.options.blind_margin) & (vio > self.options.blind_vio))
            for at, vio in history.series("max_vio")
            if at in losses
        ]
        held = history.held(conditions, sample.step, _STEPS)
        return [
            Finding(
                metric="max_vio",
                value=float(sample.values["max_vio"][at]),
                limit=self.options.blind_vio,
                since=since,
                layer=layer,
                expert=int(sample.tokens_per_expert[at].argmax()),
            )
            for at, (layer, since) in enumerate(zip(sample.layers, held, strict=True))
            if since is not None
        ]

    def recovered(self, said: AlarmRecord, sample: Sample, history: History) -> bool:
        """Return whether the load is even again, or the loss says that it is not."""
        return (
            value_at(said, sample) <= self.options.blind_vio
            or abs(value_at(said, sample, "balance_loss") - 1) > self.options.blind_margin
        )
