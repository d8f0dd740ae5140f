"""One row a run: what the terminal's table and the head of the page show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.observe.sink import alarm_key
from megatron_ext.report.facts import short
from megatron_ext.report.view import View, ending

RAISED = ("raised", "changed")


@dataclass(frozen=True)
class Row:
    """One run in words and numbers; empty text where it was not recorded."""

    label: str
    colour: str
    kind: str
    steps: str
    tokens: str
    train_loss: str
    held_out: str
    step_time: str
    max_vio: str
    alarms: int
    starts: int


def summary_rows(views: Sequence[View]) -> list[Row]:
    """Return a row for each run."""
    return [_row(view) for view in views]


def standing_alarms(view: View) -> list[dict[str, object]]:
    """Return the alarms that were raised and not cleared, in order of appearance."""
    standing: dict[tuple[object, object], dict[str, object]] = {}
    for record in view.run.alarms:
        key = alarm_key(record)
        if record.get("state", "raised") in RAISED:
            standing[key] = {**standing.get(key, {}), **record}
        else:
            standing.pop(key, None)
    return list(standing.values())


def _row(view: View) -> Row:
    rows = view.run.rows
    held, train, vio = view.held_out(), view.loss(), view.max_vio()
    tokens = train.tokens if len(train) else None
    seconds = view.step_seconds()
    return Row(
        label=view.label,
        colour=view.colour,
        kind=_kind(view),
        steps=f"{rows[0].step} to {rows[-1].step}" if rows else "none yet",
        tokens=short(float(tokens[-1])) if tokens is not None else "",
        train_loss=f"{train.values[0]:.3f} → {ending(train.values):.3f}" if len(train) else "",
        held_out=f"{held.values[0]:.3f} → {held.values[-1]:.3f}" if len(held) else "",
        step_time=f"{seconds * 1000:.0f} ms" if seconds is not None else "",
        max_vio=f"{vio.values[-1]:.2f}" if len(vio) else "",
        alarms=len(standing_alarms(view)),
        starts=len(view.info.starts),
    )


def _kind(view: View) -> str:
    experts, topk = view.info.config.get("num_experts"), view.info.config.get("moe_router_topk")
    if experts:
        return f"MoE, {experts} experts, top-{topk}"
    return "MoE" if view.is_moe else "dense"
