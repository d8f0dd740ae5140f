"""The lines of a run directory's files: strict JSON, one object a line."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import orjson

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def metric_line(step: int, start: int, samples: int | None, metrics: Mapping[str, float]) -> bytes:
    """Return a line of metrics.jsonl; nan and infinities become the strings that Python's float() reads."""
    line: dict[str, object] = {"step": step, "time": round(time.time(), 3), "start": start}
    if samples is not None:
        line["samples"] = samples
    line["metrics"] = {key: number(float(value)) for key, value in metrics.items()}
    return orjson.dumps(line)


def routing_line(start: int, step: int, layers: Sequence[int], counts: np.ndarray) -> bytes:
    """Return a line of routing.jsonl; `counts` is int64 [L, E], C-contiguous."""
    line = {"step": step, "start": start, "layers": list(layers), "tokens_per_expert": np.ascontiguousarray(counts)}
    return orjson.dumps(line, option=_OPTIONS)


def alarm_line(start: int, record: Mapping[str, object]) -> bytes:
    """Return a line of alarms.jsonl: the record with its start and the time."""
    line = {"time": round(time.time(), 3), **record, "start": start}
    return orjson.dumps(line, default=str, option=_OPTIONS)


def number(value: float) -> float | str:
    """Return a value as strict JSON can hold it: nan and infinities as the strings that float() reads."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
