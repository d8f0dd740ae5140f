"""Sections beside the curves: alarms over time, sources of the data, where the step goes, memory of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.models import BasicTicker, ColumnDataSource, HoverTool

from megatron_ext.observe.sink import CLEARED, alarm_key
from megatron_ext.report.charts import FLOAT, Chart, new_figure
from megatron_ext.report.first_look import GIB, peak_memory, where
from megatron_ext.report.view import View

# Megatron's timers that don't overlap at its timing level 1; level 2 splits the first into forward and backward.
TIMERS = {
    "forward-backward-time": "forward and backward",
    "all-grads-sync-time": "gradient sync",
    "params-all-gather-time": "parameter gather",
    "optimizer-time": "optimizer",
}
TOTAL = "iteration-time"
SHADES = (0.95, 0.7, 0.5, 0.35, 0.18)
MAX_RANKS = 256
# Peaks closer than this are the same to a reader.
ALIKE = 0.01


def alarm_spans(view: View) -> list[dict[str, Any]]:
    """Return one record an alarm's life: the last line about it with `start` and `end` (None: it stands)."""
    open_ones: dict[tuple[object, object], dict[str, Any]] = {}
    done = []
    for record in view.run.alarms:
        key = alarm_key(record)
        if record.get("state") == CLEARED:
            begun = open_ones.pop(key, record)
            done.append({**begun, "end": record.get("step")})
        else:
            open_ones[key] = {**open_ones.get(key, {}), **record, "end": None}
    spans = [*done, *open_ones.values()]
    return sorted(spans, key=lambda one: (one["end"] is not None, one.get("since_step") or 0))


def alarm_chart(views: Sequence[View], axis: str) -> Chart | None:
    """Return the timeline: a bar from the step an alarm was raised to its clearing, or to the end of the run."""
    rows = [(view, span) for view in views for span in alarm_spans(view)]
    if not rows:
        return None
    names = list(dict.fromkeys(str(span.get("name", "alarm")).replace("_", " ") for _, span in rows))
    plot = new_figure(axis, "", height=70 + 28 * max(len(names), 2), y_range=names[::-1])
    for view in views:
        spans = alarm_spans(view)
        if not spans:
            continue
        begin = np.array([span.get("since_step") or span.get("step") or 0 for span in spans])
        end = np.array([view.last_step() if span["end"] is None else span["end"] for span in spans])
        data: dict[str, Any] = {
            "name": [str(span.get("name", "alarm")).replace("_", " ") for span in spans],
            "place": [where(span) or "the whole step" for span in spans],
            "state": ["stands" if span["end"] is None else f"cleared at step {span['end']}" for span in spans],
            "step": begin.astype(FLOAT),
            "step_end": np.maximum(end, begin).astype(FLOAT),
        }
        tokens = view.tokens(np.stack([begin, np.maximum(end, begin)]).ravel())
        if tokens is not None:
            data["tokens"], data["tokens_end"] = tokens.astype(FLOAT).reshape(2, -1)
        columns = ColumnDataSource(data)
        style = {"source": columns, "color": view.colour, "name": view.label}
        bar = plot.segment(axis, "name", f"{axis}_end", "name", line_width=8, alpha=0.6, **style)
        plot.scatter(axis, "name", size=10, **style)
        plot.add_tools(
            HoverTool(
                renderers=[bar], tooltips=[("", "@name: @place"), ("raised at step", "@step{0,0}"), ("", "@state")]
            )
        )
    return Chart(json_item(plot), [], int(plot.height))  # type: ignore[arg-type]


def source_chart(view: View) -> tuple[Chart, str] | None:
    """Return each expert's share of tokens by label in the last labelled frame, of the layer that specializes most."""
    frame = next((frame for frame in reversed(view.run.routing) if frame.source_counts is not None), None)
    if frame is None or frame.source_counts is None or not frame.source_counts.sum():
        return None
    bits = np.array([mutual_information(counts) for counts in frame.source_counts])
    row = int(bits.argmax())
    counts = frame.source_counts[row]
    share = counts / np.maximum(counts.sum(axis=0), 1)
    experts = share.shape[1]
    plot = new_figure(None, "share of its tokens", height=240, x_range=(-0.6, experts - 0.4), y_range=(0, 1))
    plot.xaxis.axis_label = "expert"
    plot.xaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
    below = np.zeros(experts)
    for at, label in enumerate(frame.sources):
        data = {
            "expert": np.arange(experts),
            "bottom": below,
            "top": below + share[at],
            "share": share[at],
            "label": [label] * experts,
        }
        bar = plot.vbar(
            "expert",
            0.9,
            "top",
            "bottom",
            source=ColumnDataSource(data),
            color=view.colour,
            fill_alpha=SHADES[at % len(SHADES)],
            line_alpha=0,
        )
        plot.add_tools(HoverTool(renderers=[bar], tooltips=[("expert", "@expert"), ("@label", "@share{0.0%}")]))
        below = below + share[at]
    top = int((share.max(axis=0) * (counts.sum(axis=0) > 0)).argmax())
    main = int(share[:, top].argmax())
    label, overall = frame.sources[main], counts[main].sum() / counts.sum()
    text = (
        f"{view.label}: at step {frame.step} layer {frame.layers[row]} separates sources most, {bits[row]:.3f} bits "
        f"between label and expert (mean over layers {bits.mean():.3f}). Expert {top} gets {share[main, top]:.0%} of "
        f"its tokens from {label}, which is {overall:.0%} of all. From the bottom: {', '.join(frame.sources)}."
    )
    return Chart(json_item(plot), [], 240), text  # type: ignore[arg-type]


def mutual_information(counts: np.ndarray) -> float:
    """Return the mutual information of label and expert, in bits; counts int64 [S, E]."""
    joint = counts / max(counts.sum(), 1)
    apart = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(joint > 0, joint * np.log2(joint / apart), 0.0)
    return float(terms.sum())


def step_split(view: View) -> dict[str, float]:
    """Return median seconds of a step by part, the unnamed rest last; empty where Megatron's timers were not logged."""
    total = view.series(TOTAL).values
    parts = {name: float(np.median(values)) for key, name in TIMERS.items() if len(values := view.series(key).values)}
    if not len(total) or not parts:
        return {}
    rest = float(np.median(total)) - sum(parts.values())
    return {**parts, **({"the rest (data, logging, hooks)": rest} if rest > 0 else {})}


def split_chart(views: Sequence[View]) -> tuple[Chart, list[str]] | None:
    """Return one bar a run, cut into the parts of its median step."""
    splits = {view.label: (view, step_split(view)) for view in views}
    splits = {label: pair for label, pair in splits.items() if pair[1]}
    if not splits:
        return None
    plot = new_figure(None, "", height=80 + 40 * len(splits), y_range=list(splits)[::-1])
    plot.xaxis.axis_label = "milliseconds"
    sentences = []
    for label, (view, parts) in splits.items():
        ends = np.cumsum(list(parts.values())) * 1000
        data = {
            "run": [label] * len(parts),
            "left": ends - np.array(list(parts.values())) * 1000,
            "right": ends,
            "part": list(parts),
            "ms": np.array(list(parts.values())) * 1000,
            "alpha": [SHADES[at % len(SHADES)] for at in range(len(parts))],
        }
        bar = plot.hbar(
            "run",
            0.7,
            "right",
            "left",
            source=ColumnDataSource(data),
            color=view.colour,
            fill_alpha="alpha",
            line_alpha=0,
        )
        plot.add_tools(HoverTool(renderers=[bar], tooltips=[("@part", "@ms{0.0} ms")]))
        whole = sum(parts.values())
        listed = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts.items())
        sentences.append(f"{label}: a step takes {whole * 1000:.0f} ms (median): {listed}.")
    return Chart(json_item(plot), [], int(plot.height)), sentences  # type: ignore[arg-type]


def memory_chart(views: Sequence[View]) -> tuple[Chart, list[str]] | None:
    """Return the peak memory of every rank."""
    peaks = {view.label: (view, peak_memory(view)) for view in views}
    peaks = {label: pair for label, pair in peaks.items() if pair[1]}
    if not peaks:
        return None
    plot = new_figure(None, "peak memory, GiB", height=240)
    plot.xaxis.axis_label = "rank"
    plot.xaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
    plot.y_range.start = 0
    sentences = []
    width = 0.8 / len(peaks)
    for at, (label, (view, by_rank)) in enumerate(peaks.items()):
        ranks = list(by_rank)[:MAX_RANKS]
        data = {
            "x": np.array(ranks) + (at - (len(peaks) - 1) / 2) * width,
            "rank": ranks,
            "gib": [by_rank[rank] / GIB for rank in ranks],
        }
        bar = plot.vbar(
            "x", width * 0.92, "gib", source=ColumnDataSource(data), color=view.colour, name=label, line_alpha=0
        )
        plot.add_tools(HoverTool(renderers=[bar], tooltips=[("", f"{label}, rank @rank"), ("peak", "@gib{0.00} GiB")]))
        most, least = max(by_rank, key=lambda rank: by_rank[rank]), min(by_rank, key=lambda rank: by_rank[rank])
        if len(by_rank) == 1:
            sentences.append(f"{label}: its one rank peaked at {by_rank[most] / GIB:.2f} GiB.")
        elif by_rank[most] - by_rank[least] < ALIKE * by_rank[most]:
            sentences.append(f"{label}: all {len(by_rank)} ranks peaked at about {by_rank[most] / GIB:.2f} GiB.")
        else:
            sentences.append(
                f"{label}: rank {most} peaked highest, at {by_rank[most] / GIB:.2f} GiB; rank {least} lowest, "
                f"at {by_rank[least] / GIB:.2f} GiB."
            )
    return Chart(json_item(plot), [], 240), sentences  # type: ignore[arg-type]
