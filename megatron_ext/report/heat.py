"""Heat maps of the load: layer x expert with a slider over time, and layer x time."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    CustomJSHover,
    CustomJSTickFormatter,
    HoverTool,
    LinearColorMapper,
)

from megatron_ext.report.charts import Chart, new_figure, unit_range
from megatron_ext.report.thin import thin_experts, thin_frames
from megatron_ext.report.view import View, frame_max_vio
from megatron_ext.tracking.rundir import RoutingFrame

# The colour scale is log2 of load over an even load, from an eighth to eight times; code 0 is "no token".
OCTAVES = 3.0
SCALE_MARKS = ((-3, "⅛"), (-2, "¼"), (-1, "½"), (0, "even"), (1, "2×"), (2, "4×"), (3, "8×"))
COLD = ("#08306b", "#2171b5", "#6baed6", "#c6dbef", "#f2f0eb")
HOT = ("#f2f0eb", "#fdbb84", "#ef6548", "#b30000", "#67000d")
NO_TOKEN = "#111111"
MAX_COLUMNS = 128
MAX_TIME_COLUMNS = 300
_RATIO_JS = """
if (value < 0.5) return 'no token'
const ratio = Math.pow(2, (value - 128) / 127 * octaves)
const edge = value >= 254.5 ? ' or more' : value <= 1.5 ? ' or less' : ''
return ratio.toFixed(2) + ' times an even share' + edge
"""


@dataclass(frozen=True)
class Slider:
    """Frames for the page's slider: steps, and codes uint8 [F, L, C] as base64."""

    steps: list[int]
    data: str
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Scale:
    """The colour scale for the page: a CSS gradient, marks as (place in percent, text), the colour of no token."""

    gradient: str
    marks: tuple[tuple[float, str], ...]
    none: str


def scale() -> Scale:
    """Return the scale of all heat maps of load."""
    marks = tuple((round((power + OCTAVES) / (2 * OCTAVES) * 100, 1), text) for power, text in SCALE_MARKS)
    return Scale(f"linear-gradient(to right, {', '.join((*COLD, *HOT[1:]))})", marks, NO_TOKEN)


@dataclass(frozen=True)
class HeatMap:
    """A heat map with its slider."""

    chart: Chart
    slider: Slider


def codes(ratio: np.ndarray) -> np.ndarray:
    """Return load over an even load as uint8: 0 for none, 1 to 255 for an eighth to eight times, 128 for even."""
    with np.errstate(divide="ignore"):
        octave = np.clip(np.log2(ratio), -OCTAVES, OCTAVES)
    return np.where(ratio > 0, 128 + np.round(octave / OCTAVES * 127), 0).astype(np.uint8)


def load_ratio(frame: RoutingFrame) -> np.ndarray:
    """Return n_e / mean(n_e), float64 [L, E]; 0 in a layer without tokens."""
    mean = frame.counts.mean(axis=1, keepdims=True)
    return np.where(mean > 0, frame.counts / np.maximum(mean, 1e-12), 0.0)


def expert_map(view: View, budget_bytes: int) -> HeatMap:
    """Return the layer x expert map of a run with routing frames.

    Args:
        view: The run; needs at least one frame.
        budget_bytes: Bytes of codes that the page has for this map; decides how many frames the slider gets.
    """
    frames = [frame for frame in view.run.routing if frame.counts.shape == view.run.routing[-1].counts.shape]
    layers, experts = frames[-1].counts.shape
    columns = min(experts, MAX_COLUMNS)
    chosen = thin_frames(len(frames), max(2, min(60, budget_bytes // (layers * columns))))
    grids, note, width = [], "", 1
    for index in chosen.keep:
        put = thin_experts(load_ratio(frames[index]), MAX_COLUMNS)
        high, low = codes(put.busiest), codes(put.quietest)
        further = np.abs(low.astype(int) - 128) > np.abs(high.astype(int) - 128)
        grids.append(np.where(further, low, high))
        note, width = put.note, put.width
    stack = np.stack(grids)
    plot = _grid(stack[-1], [int(layer) for layer in frames[-1].layers], width)
    notes = [text for text in (note, chosen.note) if text]
    steps = [int(frames[index].step) for index in chosen.keep]
    data = base64.b64encode(stack.tobytes()).decode()
    height = int(plot.height)
    return HeatMap(Chart(json_item(plot), notes, height), Slider(steps, data, stack.shape))  # type: ignore[arg-type]


def time_map(view: View) -> Chart | None:
    """Return the layer x time map of the busiest expert's load; None with fewer than three frames or two layers."""
    frames = [frame for frame in view.run.routing if frame.counts.shape == view.run.routing[-1].counts.shape]
    if len(frames) < 3 or len(frames[0].layers) < 2:
        return None
    at = np.array([frame.step for frame in frames])
    # Even columns over time; each shows the last frame sampled by then.
    columns = np.linspace(at[0], at[-1], min(len(frames), MAX_TIME_COLUMNS))
    index = np.searchsorted(at, columns, side="right") - 1
    vio = np.stack([1.0 + frame_max_vio(frame.counts) for frame in frames], axis=1)
    values = vio[:, index]
    layers = [int(layer) for layer in frames[-1].layers]
    plot = new_figure(
        None,
        "MoE layer",
        height=_height(len(values)),
        x_range=unit_range(at[0], at[-1]),
        y_range=unit_range(-0.5, len(values) - 0.5),
    )
    plot.xaxis.axis_label = "step"
    shown = ColumnDataSource(
        {"image": [codes(values)], "x": [at[0]], "y": [-0.5], "dw": [at[-1] - at[0]], "dh": [len(values)]}
    )
    _draw(plot, shown, layers)
    _hover(plot, layers, [("step", "$x{0,0}"), ("busiest expert", "@image{custom}")])
    notes = [f"{len(frames):,} sampled steps; {len(columns)} are drawn."] if len(columns) < len(frames) else []
    return Chart(json_item(plot), notes, int(plot.height))  # type: ignore[arg-type]


def _grid(grid: np.ndarray, layers: Sequence[int], width: int) -> Any:
    rows, columns = grid.shape
    plot = new_figure(
        None,
        "MoE layer",
        height=_height(rows),
        x_range=unit_range(-0.5, columns - 0.5),
        y_range=unit_range(-0.5, rows - 0.5),
    )
    plot.xaxis.axis_label = "expert"
    plot.xaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
    if width > 1:
        plot.xaxis.formatter = CustomJSTickFormatter(code=f"return tick * {width}")
    shown = ColumnDataSource({"image": [grid], "x": [-0.5], "y": [-0.5], "dw": [columns], "dh": [rows]}, name="frames")
    _draw(plot, shown, layers)
    expert = "const e = Math.round(special_vars.x) * width; return width > 1 ? `${e} to ${e + width - 1}` : `${e}`"
    _hover(
        plot,
        layers,
        [("expert", "$x{custom}"), ("load", "@image{custom}")],
        {"$x": CustomJSHover(args={"width": width}, code=expert)},
    )
    return plot


def _draw(plot: Any, shown: ColumnDataSource, layers: Sequence[int]) -> None:
    mapper = LinearColorMapper(palette=_palette(), low=0, high=255)
    plot.image(image="image", x="x", y="y", dw="dw", dh="dh", source=shown, color_mapper=mapper, level="image")
    plot.grid.visible = False
    names = {str(index): str(layer) for index, layer in enumerate(layers)}
    plot.yaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
    plot.yaxis.formatter = CustomJSTickFormatter(args={"names": names}, code="return names[String(tick)] ?? ''")


def _hover(
    plot: Any, layers: Sequence[int], tooltips: list[tuple[str, str]], more: dict[str, Any] | None = None
) -> None:
    row = CustomJSHover(args={"names": list(layers)}, code="return String(names[Math.round(special_vars.y)])")
    plot.add_tools(
        HoverTool(
            tooltips=[("layer", "$y{custom}"), *tooltips],
            formatters={"$y": row, "@image": CustomJSHover(args={"octaves": OCTAVES}, code=_RATIO_JS), **(more or {})},
        )
    )


def _height(rows: int) -> int:
    """Return a figure's height in pixels: rows thick enough to see, the whole small enough for a phone."""
    return int(min(max(rows * 14, 90), 420)) + 50


def _palette() -> list[str]:
    """Return 256 colours: near-black for no token, then blue, pale, red: even is pale, so what stands out is uneven."""
    return [NO_TOKEN, *_blend(COLD, 128), *_blend(HOT, 127)]


def _blend(stops: Sequence[str], number: int) -> list[str]:
    points = np.array([[int(stop[at : at + 2], 16) for at in (1, 3, 5)] for stop in stops], dtype=float)
    where = np.linspace(0, len(stops) - 1, number)
    channels = [np.interp(where, np.arange(len(stops)), points[:, channel]) for channel in range(3)]
    return [f"#{int(red):02x}{int(green):02x}{int(blue):02x}" for red, green, blue in zip(*channels, strict=True)]
