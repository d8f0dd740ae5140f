"""The page's sections in order: what each shows, and the sentences under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.report import extras, facts, norms
from megatron_ext.report.charts import Chart, Curve, lines
from megatron_ext.report.first_look import findings, measure, where
from megatron_ext.report.heat import Scale, Slider, expert_map, scale, time_map
from megatron_ext.report.view import View, common_axis

# What the page may spend on the sliders' frames, over all runs, before base64.
HEAT_BYTES = 400_000
# Layers with a norm fan of their own, a run.
FANS = 3


@dataclass
class Figure:
    """A chart with its heading (empty where the section's says it) and its slider, if it has one."""

    chart: Chart
    title: str = ""
    slider: Slider | None = None


@dataclass(frozen=True)
class AlarmRow:
    """An alarm in the page's table, in words."""

    run: str
    colour: str
    name: str
    where: str
    since: str
    value: str
    state: str
    why: str
    remedy: str
    link: str


@dataclass
class Section:
    """One part of the page."""

    anchor: str
    title: str
    sentences: list[str]
    figures: list[Figure] = field(default_factory=list)
    help: str = ""
    """How to read the chart, for someone who sees it for the first time."""
    scale: Scale | None = None
    alarms: list[AlarmRow] = field(default_factory=list)


def build(views: Sequence[View]) -> list[Section]:
    """Return the sections for which there is data."""
    made = [
        first(views),
        loss(views),
        alarms(views),
        balance(views),
        heat(views),
        norm_fans(views),
        sources(views),
        split(views),
        memory(views),
    ]
    return [section for section in made if section is not None]


def first(views: Sequence[View]) -> Section:
    """What to look at first."""
    return Section("first", "What to look at first", findings(views))


def loss(views: Sequence[View]) -> Section:
    """Training and held-out loss of all runs over one axis."""
    curves = [Curve(view.loss(), view, "training", alpha=0.85) for view in views]
    curves += [Curve(view.held_out(), view, "held out", dashed=True, points=True) for view in views]
    chart = lines(curves, common_axis(views), "loss", height=340)
    figures = [Figure(chart)] if chart else []
    alike = facts.equally_long(views)
    if alike:
        curves = [Curve(view.from_start(curve.series), view, curve.name, curve.dashed, curve.points, curve.alpha)
                  for view in alike for curve in curves if curve.view is view]  # fmt: skip
        own = lines(curves, common_axis(views), "loss", height=340)
        figures += [Figure(own, "From each run's own start, equally many tokens")] if own else []
    reading = "Solid: training. Dashed with points: held out."
    return Section("loss", "Loss", facts.loss_sentences(views), figures, reading)


def balance(views: Sequence[View]) -> Section | None:
    """MaxVio over time."""
    moe = [view for view in views if view.is_moe]
    curves = [Curve(view.max_vio("max"), view, "worst layer") for view in moe]
    curves += [Curve(view.max_vio("mean"), view, "mean over layers", dashed=True) for view in moe]
    chart = lines(curves, common_axis(views), "MaxVio")
    if chart is None:
        return None
    reading = (
        "MaxVio is the busiest expert's load over an even load, minus 1: 0 is even, 1 is twice the mean. "
        "Solid: the worst layer. Dashed: the mean over layers."
    )
    return Section("balance", "Load balance over time", facts.max_vio_sentences(views), [Figure(chart)], reading)


def heat(views: Sequence[View]) -> Section | None:
    """Tokens per expert, by layer, over time."""
    moe = [view for view in views if view.run.routing]
    if not moe:
        return None
    figures, sentences = [], []
    for view in moe:
        found = expert_map(view, HEAT_BYTES // len(moe))
        figures.append(Figure(found.chart, f"{view.label}: every expert", found.slider))
        over_time = time_map(view)
        if over_time is not None:
            figures.append(Figure(over_time, f"{view.label}: the busiest expert of each layer, over time"))
        text = facts.heat_sentence(view)
        sentences.append(f"{view.label}: {text[0].lower()}{text[1:]}" if len(moe) > 1 else text)
    reading = (
        "A row is a layer, a column an expert. Pale is an even share, red more, blue less, black no token at all. "
        "Move the slider through time."
    )
    return Section("experts", "Tokens per expert", sentences, figures, reading, scale())


def alarms(views: Sequence[View]) -> Section | None:
    """When alarms were raised and cleared, and what to do."""
    chart = extras.alarm_chart(views, common_axis(views))
    if chart is None:
        return None
    rows = [_alarm_row(view, span) for view in views for span in extras.alarm_spans(view)]
    standing = sum(row.state == "stands" for row in rows)
    said = [f"{len(rows)} alarms were raised, {standing} of them stand at the end of their run."]
    reading = (
        "A bar runs from the step at which an alarm was raised to the one at which it cleared, or to the run's end."
    )
    return Section("alarms", "Alarms", said, [Figure(chart)], reading, alarms=rows)


def _alarm_row(view: View, span: dict[str, Any]) -> AlarmRow:
    value, limit = span.get("value"), span.get("limit")
    shown = "" if value is None else f"{measure(span)} {float(value):.4g}"
    return AlarmRow(
        view.label,
        view.colour,
        str(span.get("name", "alarm")).replace("_", " "),
        where(span) or "whole step",
        f"step {span.get('since_step', '?')}",
        shown + (f" (limit {float(limit):.4g})" if shown and limit is not None else ""),
        "stands" if span["end"] is None else f"cleared at step {span['end']}",
        str(span.get("why", "")),
        str(span.get("remedy", "")),
        str(span.get("link", "")),
    )


def norm_fans(views: Sequence[View]) -> Section | None:
    """How far the experts' outputs spread."""
    figures, sentences = [], []
    for view in views:
        fans = norms.spread(view)
        if not fans:
            continue
        ordered = sorted(fans, key=lambda layer: -fans[layer][1][-1, -1])[:FANS]
        figures += [
            Figure(norms.fan(view, fans, layer, common_axis(views)), f"{view.label}: layer {layer}")
            for layer in ordered
        ]
        sentences.append(norms.sentence(view, fans))
        if len(fans) > FANS:
            sentences.append(f"{view.label}: the {FANS} widest of {len(fans)} layers are drawn.")
    if not figures:
        return None
    reading = (
        "RMS of each expert's output over the layer's median, logarithmic. Line: the median and the largest. "
        "Bands: the middle half, 5 to 95 %, and all experts."
    )
    return Section("norms", "Expert norms", sentences, figures, reading)


def sources(views: Sequence[View]) -> Section | None:
    """Which experts specialize on which source of the data."""
    made = [(view, found) for view in views if (found := extras.source_chart(view))]
    figures = [Figure(chart, view.label if len(made) > 1 else "") for view, (chart, _) in made]
    reading = "Each bar is an expert of the layer that separates the sources most, cut by the source of its tokens."
    return Section("sources", "Experts by source", [text for _, (_, text) in made], figures, reading) if made else None


def split(views: Sequence[View]) -> Section | None:
    """Where the step goes."""
    found = extras.split_chart(views)
    if found is None:
        return None
    reading = "Megatron's timers, the slowest rank's, median over the run. Parts from left to right as named below."
    return Section("time", "Where a step goes", found[1], [Figure(found[0])], reading)


def memory(views: Sequence[View]) -> Section | None:
    """Peak memory of every rank."""
    found = extras.memory_chart(views)
    return (
        Section("memory", "Memory", found[1], [Figure(found[0])], "The highest allocation of each rank.")
        if found
        else None
    )
