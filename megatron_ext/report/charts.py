"""Bokeh figures. Colours of axes, grids and text come from the page's CSS (`--bk-...`): they follow dark and light."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d
from bokeh.plotting import figure

from megatron_ext.report.thin import thin
from megatron_ext.report.view import Series, View

AXIS_TITLES = {"step": "step", "tokens": "training tokens"}
# 32-bit floats halve the page; seven digits are more than a pixel can show.
FLOAT = np.float32


@dataclass
class Curve:
    """One line of a chart; `run` ties it to the legend's switch."""

    series: Series
    view: View
    name: str
    dashed: bool = False
    points: bool = False
    alpha: float = 1.0


@dataclass
class Chart:
    """A figure ready for the page, with what a reader must know about how it was drawn."""

    item: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    height: int = 280


def new_figure(axis: str | None, y_title: str, *, height: int = 280, log: bool = False, **options: Any) -> Any:
    """Return an empty figure that fills its column; `axis` is step, tokens or None where x is something else."""
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        y_axis_type="log" if log else "auto",
        y_axis_label=y_title,
        output_backend="canvas",
        x_axis_label=AXIS_TITLES.get(axis or ""),
        tags=["x-axis"] if axis else [],
        **options,
    )
    for visual in (plot.xaxis, plot.yaxis):
        visual.axis_label_text_font_style = "normal"
        visual.axis_label_text_font_size = "13px"
        visual.major_label_text_font_size = "12px"
    if axis:
        plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]a" if axis == "tokens" else "0,0")
    plot.outline_line_color = None
    plot.min_border_right = 16
    return plot


def source(series: Series, values: dict[str, np.ndarray]) -> ColumnDataSource:
    """Return columns for one curve: step, tokens (where known) and the given ones."""
    data = {"step": series.steps.astype(FLOAT), **{name: column.astype(FLOAT) for name, column in values.items()}}
    if series.tokens is not None:
        data["tokens"] = series.tokens.astype(FLOAT)
    return ColumnDataSource(data)


def lines(curves: Sequence[Curve], axis: str, y_title: str, *, log: bool = False, height: int = 280) -> Chart | None:
    """Return a chart of curves; None where none has a point."""
    curves = [curve for curve in curves if len(curve.series)]
    if not curves:
        return None
    plot = new_figure(axis, y_title, log=log, height=height)
    notes: list[str] = []
    hovered = []
    for curve in curves:
        chosen = thin(curve.series.values)
        notes += [chosen.note] if chosen.note and chosen.note not in notes else []
        columns = source(part(curve.series, chosen.keep), {"value": curve.series.values[chosen.keep]})
        style: dict[str, Any] = {"color": curve.view.colour, "alpha": curve.alpha, "name": curve.view.label}
        line = plot.line(
            axis, "value", source=columns, line_width=2, line_dash="dashed" if curve.dashed else "solid", **style
        )
        line.tags = [curve.name]
        hovered.append(line)
        if curve.points or len(chosen.keep) == 1:
            plot.scatter(axis, "value", source=columns, size=7, **style)
    for line in hovered:
        plot.add_tools(
            HoverTool(
                renderers=[line],
                mode="vline" if len(hovered) == 1 else "mouse",
                tooltips=[("", f"{line.name}, {line.tags[0]}"), ("step", "@step{0,0}"), (y_title, "@value{0.0000}")],
            )
        )
    return Chart(json_item(plot), notes, height)  # type: ignore[arg-type]


def part(series: Series, keep: np.ndarray) -> Series:
    """Return the chosen points of a curve."""
    tokens = None if series.tokens is None else series.tokens[keep]
    return Series(series.steps[keep], tokens, series.values[keep])


def unit_range(low: float, high: float) -> Range1d:
    """Return a fixed range with no slack, for grids of cells."""
    return Range1d(start=low, end=high, bounds=(low, high))
