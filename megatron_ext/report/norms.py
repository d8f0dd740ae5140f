"""Expert norm fans: how far the experts' outputs of one layer spread, over time."""

from __future__ import annotations

import warnings

import numpy as np
from bokeh.embed import json_item
from bokeh.models import HoverTool

from megatron_ext.report.charts import Chart, new_figure, source
from megatron_ext.report.thin import thin_frames
from megatron_ext.report.view import Series, View

MAX_FRAMES = 200
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def spread(view: View) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return layer -> (steps [F], quantiles [F, 7] of expert norm over the layer's median), where sampled."""
    found: dict[int, list[tuple[int, np.ndarray]]] = {}
    for frame in view.run.routing:
        if frame.expert_rms is None:
            continue
        for layer, norms in zip(frame.layers, frame.expert_rms, strict=True):
            good = norms[np.isfinite(norms)]
            if len(good) and np.median(good) > 0:
                found.setdefault(int(layer), []).append((frame.step, np.quantile(good / np.median(good), QUANTILES)))
    return {
        layer: (np.array([step for step, _ in rows]), np.stack([row for _, row in rows]))
        for layer, rows in found.items()
    }


def worst_layer(fans: dict[int, tuple[np.ndarray, np.ndarray]]) -> int:
    """Return the layer whose largest expert is furthest above the median at the end."""
    return max(fans, key=lambda layer: fans[layer][1][-1, -1])


def fan(view: View, fans: dict[int, tuple[np.ndarray, np.ndarray]], layer: int, axis: str) -> Chart:
    """Return the fan of one layer: median, middle half, 5 to 95 %, and the extremes."""
    steps, quantiles = fans[layer]
    chosen = thin_frames(len(steps), MAX_FRAMES).keep
    steps, quantiles = steps[chosen], np.maximum(quantiles[chosen], 1e-3)
    names = ("least", "q05", "q25", "median", "q75", "q95", "most")
    series = Series(steps, view.tokens(steps), quantiles[:, 3])
    columns = source(series, {name: quantiles[:, at] for at, name in enumerate(names)})
    plot = new_figure(axis, "norm over median", log=True)
    style = {"source": columns, "color": view.colour, "name": view.label}
    for low, high, alpha in (("least", "most", 0.12), ("q05", "q95", 0.2), ("q25", "q75", 0.3)):
        plot.varea(axis, low, high, fill_alpha=alpha, **style)
    line = plot.line(axis, "median", line_width=2, **style)
    plot.line(axis, "most", line_width=1, **style)
    plot.add_tools(
        HoverTool(
            renderers=[line],
            mode="vline",
            tooltips=[
                ("step", "@step{0,0}"),
                ("largest", "@most{0.00}"),
                ("95 %", "@q95{0.00}"),
                ("5 %", "@q05{0.00}"),
                ("smallest", "@least{0.00}"),
            ],
        )
    )
    notes = (
        [f"{len(fans[layer][0]):,} sampled steps; {len(chosen)} are drawn."]
        if len(chosen) < len(fans[layer][0])
        else []
    )
    return Chart(json_item(plot), notes)  # type: ignore[arg-type]


def sentence(view: View, fans: dict[int, tuple[np.ndarray, np.ndarray]]) -> str:
    """Say which layer spreads most, how far, and which expert it is."""
    layer = worst_layer(fans)
    steps, quantiles = fans[layer]
    frame = next(
        frame for frame in reversed(view.run.routing) if frame.expert_rms is not None and layer in frame.layers
    )
    assert frame.expert_rms is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expert = int(np.nanargmax(frame.expert_rms[list(frame.layers).index(layer)]))
    return (
        f"{view.label}: the widest fan is layer {layer}'s. At step {steps[-1]} its largest expert, {expert}, is "
        f"{quantiles[-1, -1]:.1f} times the layer's median (at step {steps[0]} the largest was {quantiles[0, -1]:.1f} "
        f"times), its smallest {quantiles[-1, 0]:.2f} times."
    )
