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


def metric_line(
    step: int, start: int, samples: int | None, metrics: Mapping[str, float], *, after: int | None = None
) -> bytes:
    """Return a line of metrics.jsonl; nan and infinities become the strings that Python's float() reads.

    `after` is the step that this start resumed from, None for a run's first start.
    """
    line: dict[str, object] = {"step": step, "time": round(time.time(), 3), "start": start, **_resumed(after)}
    if samples is not None:
        line["samples"] = samples
    line["metrics"] = {key: number(float(value)) for key, value in metrics.items()}
    return orjson.dumps(line)


def routing_line(
    start: int,
    step: int,
    layers: Sequence[int],
    counts: np.ndarray,
    extra: Mapping[str, object],
    *,
    after: int | None = None,
) -> bytes:
    """Return a line of routing.jsonl; `counts` is int64 [L, E]; `extra` more fields for JSON; `after` as above."""
    line = {
        "step": step,
        "start": start,
        **_resumed(after),
        "layers": layers,
        "tokens_per_expert": np.ascontiguousarray(counts),
        **extra,
    }
    return orjson.dumps(line, option=_OPTIONS)


def alarm_line(start: int, record: Mapping[str, object]) -> bytes:
    """Return a line of alarms.jsonl: the record with its start and the time; nan and infinities as in metrics.jsonl."""
    plain = {key: number(value) if isinstance(value, float) else value for key, value in record.items()}
    return orjson.dumps({"time": round(time.time(), 3), **plain, "start": start}, default=str, option=_OPTIONS)


def _resumed(after: int | None) -> dict[str, int]:
    return {} if after is None else {"after": after}


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
