"""The page's sections in order: what each shows, and the sentences under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_ext.report import facts
from megatron_ext.report.charts import Chart, Curve, lines
from megatron_ext.report.heat import Scale, Slider, expert_map, scale, time_map
from megatron_ext.report.view import View, common_axis

# What the page may spend on the sliders' frames, over all runs, before base64.
HEAT_BYTES = 400_000


@dataclass
class Figure:
    """A chart with its heading (empty where the section's says it) and its slider, if it has one."""

    chart: Chart
    title: str = ""
    slider: Slider | None = None


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


def build(views: Sequence[View]) -> list[Section]:
    """Return the sections for which there is data."""
    made = [loss(views), balance(views), heat(views)]
    return [section for section in made if section is not None]


def loss(views: Sequence[View]) -> Section:
    """Training and held-out loss of all runs over one axis."""
    curves = [Curve(view.loss(), view, "training", alpha=0.85) for view in views]
    curves += [Curve(view.held_out(), view, "held out", dashed=True, points=True) for view in views]
    chart = lines(curves, common_axis(views), "loss", height=340)
    reading = "Solid: training. Dashed with points: held out."
    return Section("loss", "Loss", facts.loss_sentences(views), [Figure(chart)] if chart else [], reading)


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
