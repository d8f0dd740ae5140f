"""A loss that jumps above its lowest value so far."""

from __future__ import annotations

import math

import numpy as np

from megatron_ext.observe import formulas
from megatron_ext.observe.alarms.history import History
from megatron_ext.observe.alarms.rule import Finding, Rule
from megatron_ext.observe.sample import Sample
from megatron_ext.observe.sink import AlarmRecord

# Losses before the first judgement: the noise has to be known.
_LEAST_LOSSES = 32
# The lowest of thousands of values lies some 4 spreads below their mean, the highest as far above it.
NOISES = 10.0
_BROKEN = "The loss is not finite: the weights are broken, or will be with the next step."


class LossSpike(Rule):
    """`lm_loss` more than 0.1 above the lowest so far, and more than 10 times its own noise from step to step.

    The second half is ours: a small batch moves the loss by more than 0.1 from one step to the next.
    """

    name = "loss_spike"

    def check(self, sample: Sample, history: History) -> list[Finding]:
        """Return at most one finding, for the highest loss since the last sample."""
        losses, lows = history.losses, history.lows
        broken = [pair for pair in history.broken if pair[0] > history.previous]
        if broken:
            since, value = broken[0]
            limit = lows[-1][1] + self.options.loss_margin if lows else math.nan
            return [Finding(metric="lm_loss", value=value, limit=limit, since=since, why=_BROKEN)]
        if len(losses) < _LEAST_LOSSES or not lows:
            return []
        values = np.array([loss for _, loss in losses])
        margin = max(self.options.loss_margin, NOISES * formulas.step_noise(values))
        # Against the lowest before it, not after it: a loss that falls fast is lower a few steps later.
        new = [pair for pair in losses if pair[0] > history.previous] or losses[-1:]
        before = {step: low for step, _ in new if (low := _lowest_before(step, lows)) is not None}
        judged = [(loss - before[step], step, loss) for step, loss in new if step in before]
        if not judged:
            return []
        above, step, loss = max(judged)
        if above <= margin:
            return []
        limit = before[step] + margin
        # "Above by more than the margin" and "over the limit" may differ in the last bit: the step itself is over it.
        since = next(at for at, value in losses if (value > limit or at == step) and at >= min(lows[-1][0], step))
        return [Finding(metric="lm_loss", value=loss, limit=limit, since=since)]

    def recovered(self, said: AlarmRecord, sample: Sample, history: History) -> bool:
        """Return whether the newest loss is a number, and enough of them are known to tell."""
        losses, broken = history.losses, history.broken
        if not losses or (broken and broken[-1][0] > losses[-1][0]):
            return False
        return len(losses) >= _LEAST_LOSSES or not math.isfinite(said.value)


def _lowest_before(step: int, lows: list[tuple[int, float]]) -> float | None:
    """Return the lowest loss of the steps before `step`; None where it is the first or too old to be remembered."""
    return next((value for at, value in reversed(lows) if at < step), None)
