"""What Trackio is given of a run directory: capped keys, pictures of the routing, alarm texts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_ext.tracking.lines import number
from megatron_ext.tracking.rundir import MetricRow, RoutingFrame

IMAGE_KEY = "moe/tokens_per_expert/heat_map"
# Trackio 0.42.0 renames these; we do it first so that what is read back compares equal.
RESERVED = frozenset({"project", "run", "timestamp", "step", "time", "metrics"})
_PER_LAYER = re.compile(r"(^|[/_])layer_\d+($|[/_])")
# Pictures at frames 1, 2, 3, 4, 5, 7, 9, ...: 40 of them reach past 8,000 frames, dense where a run changes
# fastest.
PICTURE_RATIO = 1.25


def wanted(row: MetricRow, limit: int) -> dict[str, float | str]:
    """Return a step's metrics for Trackio: at most `limit` keys, per-layer ones dropped first."""
    kept = row.metrics
    if len(kept) > limit:
        ordered = sorted(kept, key=lambda key: _PER_LAYER.search(key) is not None)
        kept = {key: kept[key] for key in ordered[:limit]}
    return {
        f"value/{key}" if key in RESERVED or key.startswith("__") else key: number(value) for key, value in kept.items()
    }


def is_stored(want: Mapping[str, float | str], stored: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether rows of one step together hold exactly the wanted values."""
    together = {key: value for metrics in stored for key, value in metrics.items()}
    return all(together.get(key) == value for key, value in want.items())


def pictured(index: int, limit: int) -> bool:
    """Return whether the routing frame number `index` (from 1) becomes a picture."""
    power = round(math.log(index) / math.log(PICTURE_RATIO))
    chosen = {math.ceil(PICTURE_RATIO**near) for near in range(max(power - 2, 0), power + 3)}
    return index in chosen and len({math.ceil(PICTURE_RATIO**below) for below in range(power + 1)}) <= limit


def picture(frame: RoutingFrame) -> np.ndarray:
    """Return a heat map, uint8 [height, width, 3]: a row a layer, a column an expert, dark for none, yellow
    for busy.

    The scale is the same in every picture: white-hot is four times the layer's mean load.
    """
    mean = np.maximum(frame.counts.mean(axis=1, keepdims=True), 1e-9)
    heat = np.clip(frame.counts / mean / 4.0, 0.0, 1.0)
    # Dark blue, purple, orange, pale yellow: ordered in brightness, readable without colour vision.
    stops = np.array([[13, 8, 60], [120, 28, 109], [237, 105, 37], [252, 255, 164]], dtype=np.float64)
    place = heat * (len(stops) - 1)
    low = np.minimum(place.astype(np.int64), len(stops) - 2)
    share = (place - low)[..., None]
    colours = stops[low] * (1 - share) + stops[low + 1] * share
    scale = (max(1, 384 // colours.shape[0]), max(1, 768 // colours.shape[1]))
    return np.repeat(np.repeat(colours.round().astype(np.uint8), scale[0], axis=0), scale[1], axis=1)


def alarm_title(record: Mapping[str, Any]) -> str:
    """Return an alert's title, for example `dead_expert raised: layer 3, expert 7`."""
    place = [f"{name} {record[name]}" for name in ("layer", "expert", "rank") if record.get(name) is not None]
    return f"{record.get('name', 'alarm')} {record.get('state', 'raised')}" + (f": {', '.join(place)}" if place else "")


def alarm_text(record: Mapping[str, Any]) -> str:
    """Return an alert's text: the value, since when, why it matters, what to try first."""
    parts = [
        ("value", record.get("value")),
        ("since step", record.get("since_step")),
        ("why", record.get("why")),
        ("try", record.get("remedy")),
    ]
    return "\n".join(f"{label}: {value}" for label, value in parts if value not in (None, ""))
