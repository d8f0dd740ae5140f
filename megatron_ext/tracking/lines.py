"""How a run directory's files are written: strict JSON, one object a line, whole files by rename."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def routing_line(
    start: int, step: int, layers: Sequence[int], counts: np.ndarray, extra: Mapping[str, object]
) -> bytes:
    """Return a line of routing.jsonl; `counts` is int64 [L, E]; `extra` holds fields ready for JSON."""
    line = {
        "step": step,
        "start": start,
        "layers": layers,
        "tokens_per_expert": np.ascontiguousarray(counts),
        **extra,
    }
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


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Replace a file whole; nan becomes null, which is right for a configuration value.

    Raises:
        OSError: It cannot be written; the old file is untouched.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | _OPTIONS, default=str))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
