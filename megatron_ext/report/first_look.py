"""What to look at first: the few findings that a person should act on, each with its reason, worst first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ext.observe.formulas import step_noise
from megatron_ext.observe.names import METRICS, aggregate_key
from megatron_ext.report.summary import standing_alarms
from megatron_ext.report.view import View, ending

# The busiest GPU sets the step: at 0.3 the others wait about a quarter of the expert time.
RANK_VIO_HIGH = 0.3
MEMORY_SPREAD_HIGH = 0.2
# A jump of the loss that a person would see: as the loss_spike alarm, but from the first steps on.
JUMP, JUMP_NOISES = 0.1, 10.0
GIB = float(1 << 30)
GAPS_SHOWN = 4


def findings(views: Sequence[View]) -> list[str]:
    """Return sentences, worst first; one that says what was checked where nothing stands out."""
    found = [
        text
        for check in (_alarms, _not_finite, _held_out, _jump, _idle, _ranks, _memory, _missing)
        for view in views
        for text in check(view)
    ]
    return found or ["Nothing stands out: " + _checked(views)]


def where(record: dict[str, object]) -> str:
    """Return an alarm's place in words, empty for an alarm of the whole step."""
    named = (("layer", "layer"), ("expert", "expert"), ("EP rank", "rank"))
    return ", ".join(f"{word} {record[name]}" for word, name in named if record.get(name) is not None)


def measure(record: dict[str, object]) -> str:
    """Return an alarm's measure in words."""
    name = str(record.get("metric") or "")
    return METRICS[name].title if name in METRICS else name


def _alarms(view: View) -> list[str]:
    sentences = []
    for record in standing_alarms(view):
        place = f" at {where(record)}" if where(record) else ""
        value = f" ({measure(record)} {float(str(record['value'])):.4g})" if record.get("value") is not None else ""
        name = str(record.get("name")).replace("_", " ")
        sentences.append(
            f"{view.label}: {name}{place} since step {record.get('since_step')}{value}. "
            f"{record.get('why', '')} Try: {record.get('remedy', '')}."
        )
    return sentences


def _not_finite(view: View) -> list[str]:
    steps, values = view.run.series(METRICS["lm_loss"].megatron_tag)
    bad = steps[~np.isfinite(values)]
    return (
        [
            f"{view.label}: the loss is not finite at {len(bad)} steps, first at step {bad[0]}. What follows it was "
            "trained on broken numbers."
        ]
        if len(bad)
        else []
    )


def _held_out(view: View) -> list[str]:
    held = view.held_out().values
    if len(held) < 2 or held[-1] < held[0]:
        return []
    return [
        f"{view.label}: the held-out loss ends at {held[-1]:.3f}, not below its start of {held[0]:.3f}. The run has "
        "learned nothing that holds for new text."
    ]


def _jump(view: View) -> list[str]:
    loss = view.loss()
    if len(loss) < 3:
        return []
    lowest = np.minimum.accumulate(loss.values)[:-1]
    above = loss.values[1:] - lowest
    at = int(above.argmax()) + 1
    if above[at - 1] < max(JUMP, JUMP_NOISES * step_noise(loss.values)):
        return []
    later = np.flatnonzero(loss.values[at:] <= lowest[at - 1])
    after = f"was back there at step {loss.steps[at + later[0]]}" if len(later) else "has not come back since"
    return [
        f"{view.label}: the loss jumped to {loss.values[at]:.3f} at step {loss.steps[at]}, {above[at - 1]:.3f} above "
        f"its lowest before, and {after}. Look at what else moved at that step, then at the learning rate."
    ]


def _idle(view: View) -> list[str]:
    if not view.run.routing or any(record.get("name") == "dead_expert" for record in standing_alarms(view)):
        return []
    frame = view.run.routing[-1]
    idle = int((frame.counts == 0).sum())
    if not idle:
        return []
    count = f"{idle} of {frame.counts.size} experts got no token at step {frame.step}"
    return [f"{view.label}: {count}. If that lasts, their parameters learn nothing."]


def _ranks(view: View) -> list[str]:
    vio = view.series(aggregate_key("rank_max_vio", "max")).values
    if not len(vio) or ending(vio) < RANK_VIO_HIGH:
        return []
    return [
        f"{view.label}: the busiest GPU of the worst layer gets {1 + ending(vio):.2f} times the mean of its group's "
        "tokens. The others wait for it."
    ]


def _memory(view: View) -> list[str]:
    peaks = peak_memory(view)
    if len(peaks) < 2:
        return []
    most, least = max(peaks, key=lambda rank: peaks[rank]), min(peaks, key=lambda rank: peaks[rank])
    if peaks[most] < (1 + MEMORY_SPREAD_HIGH) * peaks[least]:
        return []
    return [
        f"{view.label}: rank {most} peaked at {peaks[most] / GIB:.2f} GiB, rank {least} at "
        f"{peaks[least] / GIB:.2f} GiB. The largest rank runs out of memory first."
    ]


def _missing(view: View) -> list[str]:
    sentences = []
    gaps = view.gaps()
    if gaps:
        listed = ", ".join(f"{low} to {high}" if high > low else f"{low}" for low, high in gaps[:GAPS_SHOWN])
        more = ", ..." if len(gaps) > GAPS_SHOWN else ""
        sentences.append(
            f"{view.label}: the record has no row for steps {listed}{more}. A start that was killed, or a full disk, "
            "took them along; curves run straight across."
        )
    if view.run.skipped_lines:
        sentences.append(
            f"{view.label}: {view.run.skipped_lines} lines of its files can't be read (a kill or a full disk tore "
            "them) and are left out."
        )
    return sentences


def peak_memory(view: View) -> dict[int, float]:
    """Return every rank's peak over the run, in bytes; empty where it was not recorded for each rank."""
    prefix = "step/peak_memory/rank_"
    keys = {key: key.removeprefix(prefix) for key in view.run.keys if key.startswith(prefix)}
    peaks = {int(rank): view.series(key).values for key, rank in keys.items() if rank.isdigit()}
    return {rank: float(values.max()) for rank, values in sorted(peaks.items()) if len(values)}


def _checked(views: Sequence[View]) -> str:
    checks = ["no alarm stands"]
    if any(len(view.loss()) for view in views):
        checks += ["every loss is finite", "no training loss jumped"]
    if any(len(view.held_out()) for view in views):
        checks.append("no held-out loss ended above its start")
    if any(view.run.routing for view in views):
        checks.append("every expert got tokens in the last sampled step")
    if any(view.run.rows for view in views):
        checks.append("no step is missing")
    return ", ".join(checks) + "."
