"""A run directory read back: what `report`, `health` and the Trackio feed work from.

Files (docs/architecture.md, "The run directory"): run.json, metrics.jsonl, routing.jsonl, alarms.jsonl.
Every line is one JSON object in UTF-8. A killed process may leave a torn line, at the end or, after a full
disk, in the middle: such lines are counted and skipped.

Which line wins. A job that resumes from step R writes steps R+1, R+2, ... again. So everything that an
earlier start wrote for R+1 or beyond is dropped: the curve is the history of the weights that live on. A later
start's lines say R (`after`); where they don't, its first line's step stands for R+1. What is left for one step are
parts of one row and merged: a finished run that is started again evaluates once more at its last step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megatron_ext.errors import UserError

SCHEMA = 1
RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
ROUTING_FILE = "routing.jsonl"
ALARMS_FILE = "alarms.jsonl"
STATE_FILE = "observe.json"
_NAMED = 4  # runs that an error names


@dataclass(frozen=True)
class Start:
    """One start of the job: when, and the iteration that its checkpoint gave (None: not known)."""

    time: float
    iteration: int | None = None


@dataclass(frozen=True)
class RunInfo:
    """run.json. `id` survives resumes and moves; `config` is Megatron's arguments as plain values."""

    id: str
    name: str
    group: str = ""
    project: str = ""
    command: Sequence[str] = ()
    config: dict[str, Any] = field(default_factory=dict)
    pins: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    starts: Sequence[Start] = ()


@dataclass(frozen=True)
class MetricRow:
    """All scalars of one step.

    Attributes:
        samples: Training samples consumed so far (None: not logged).
        after: The step that this start resumed from (None: not known).
    """

    step: int
    time: float
    start: int
    samples: int | None
    metrics: dict[str, float]
    after: int | None = None

    @property
    def replaces(self) -> int:
        """The step from which on this start's lines replace those of earlier starts, if this is its first line."""
        return self.step if self.after is None else self.after + 1


@dataclass(frozen=True)
class RoutingFrame:
    """Routing of one sampled step, over all ranks; L layers, E experts, S sources.

    Attributes:
        layers: int64 [L], global layer numbers from 0.
        counts: int64 [L, E], assignments to each expert.
        expert_rms: float64 [L, E], RMS of each expert's output before the weights, nan where it got no token;
            None where it was not measured.
        after: As a row's.
        sources: S labels of the data; empty where it has none.
        source_counts: int64 [L, S, E], tokens by label and expert; None without labels.
    """

    step: int
    start: int
    layers: np.ndarray
    counts: np.ndarray
    expert_rms: np.ndarray | None = None
    sources: Sequence[str] = ()
    source_counts: np.ndarray | None = None
    after: int | None = None

    @property
    def replaces(self) -> int:
        """As a row's."""
        return self.step if self.after is None else self.after + 1


@dataclass(frozen=True)
class Run:
    """A run directory, read. `skipped_lines` counts torn or foreign lines over all its files."""

    path: Path
    info: RunInfo
    rows: Sequence[MetricRow]
    routing: Sequence[RoutingFrame]
    alarms: Sequence[dict[str, Any]]
    skipped_lines: int = 0

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """All metric names, in order of first appearance."""
        return tuple(dict.fromkeys(key for row in self.rows for key in row.metrics))

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps (int64 [N]) and values (float64 [N], may hold nan and inf) of one metric."""
        pairs = [(row.step, row.metrics[key]) for row in self.rows if key in row.metrics]
        steps = np.array([step for step, _ in pairs], dtype=np.int64)
        return steps, np.array([value for _, value in pairs], dtype=np.float64)


def read_run(path: Path, *, routing: bool = True) -> Run:
    """Read a run directory.

    Args:
        path: The directory.
        routing: Whether to read routing.jsonl, the largest file.

    Raises:
        UserError: There is no such directory or it holds no run.
    """
    if not path.is_dir():
        raise UserError("no such run directory", where=str(path), remedy="name a directory given to --moe-ext-run-dir")
    if not _holds_run(path):
        raise UserError(
            "this directory holds no run",
            where=str(path),
            why=f"it has neither {RUN_FILE} nor {METRICS_FILE}",
            remedy=_runs_near(path) or "name a directory given to --moe-ext-run-dir",
        )
    counter = _Skipped()
    lines = _metric_rows(_lines(path / METRICS_FILE, counter), counter)
    frames = _routing_frames(_lines(path / ROUTING_FILE, counter), counter) if routing else ()
    alarms = _alarms(_lines(path / ALARMS_FILE, counter), counter)
    begun: dict[int, int] = {}
    for row in lines:
        begun.setdefault(row.start, row.replaces)
    return Run(path, read_info(path), merge_rows(lines), frames, live_alarms(alarms, begun), counter.number)


def _holds_run(path: Path) -> bool:
    return (path / RUN_FILE).exists() or (path / METRICS_FILE).exists()


def _runs_near(path: Path) -> str:
    """Say which runs lie in a directory, or around it (a run's `checkpoints`); empty where none does."""
    near = [path.parent] if _holds_run(path.parent) else sorted(child for child in path.iterdir() if _holds_run(child))
    more = ", ..." if len(near) > _NAMED else ""
    return f"name a run: {', '.join(map(str, near[:_NAMED]))}{more}" if near else ""


def read_alarms(path: Path) -> list[dict[str, Any]]:
    """Return the records of `alarms.jsonl` as they were appended; empty where there is no such file."""
    skipped = _Skipped()
    return _alarms(_lines(path / ALARMS_FILE, skipped), skipped)


def live_alarms(records: Sequence[dict[str, Any]], begun: Mapping[int, int]) -> list[dict[str, Any]]:
    """Drop alarm records of steps that a later start ran again.

    Args:
        records: Of `alarms.jsonl`, in file order.
        begun: Number of a start -> the first step that it ran.
    """
    kept = []
    for record in records:
        start, step = record.get("start", 1), record.get("step")
        if step is None or all(step < first for number, first in begun.items() if number > start):
            kept.append(record)
    return kept


def read_info(path: Path) -> RunInfo:
    """Return run.json; a directory without a readable one (an old copy, a torn disk) gets a stand-in."""
    try:
        raw = orjson.loads((path / RUN_FILE).read_bytes())
        starts = tuple(Start(float(one["time"]), one.get("iteration")) for one in raw.get("starts", ()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return RunInfo(id="", name=path.name)
    known = {name: raw[name] for name in RunInfo.__dataclass_fields__ if name in raw and name != "starts"}
    return RunInfo(**{"id": "", "name": path.name, **known}, starts=starts)


def parse_metric_line(raw: bytes) -> MetricRow | None:
    """Return one line of metrics.jsonl as a row, or None for a torn or foreign one."""
    try:
        return _metric_row(orjson.loads(raw))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def merge_rows(rows: Sequence[MetricRow]) -> list[MetricRow]:
    """Apply "which line wins" to rows in file order; return one row a step, ascending."""
    view: dict[int, MetricRow] = {}
    current = 0
    for row in rows:
        if row.start < current:
            continue  # a straggler of a start that was already replaced
        if row.start > current:
            view = {step: kept for step, kept in view.items() if step < row.replaces}
            current = row.start
        before = view.get(row.step)
        view[row.step] = _merged(before, row) if before is not None else row
    return [view[step] for step in sorted(view)]


def parse_routing_line(raw: bytes) -> RoutingFrame | None:
    """Return one line of routing.jsonl as a frame, or None for a torn or foreign one."""
    try:
        return _routing_frame(orjson.loads(raw))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def merge_frames(frames: Sequence[RoutingFrame]) -> list[RoutingFrame]:
    """Apply "which line wins" to frames in file order; return one frame a step, ascending."""
    view: dict[int, RoutingFrame] = {}
    current = 0
    for frame in frames:
        if frame.start < current:
            continue
        if frame.start > current:
            view = {step: kept for step, kept in view.items() if step < frame.replaces}
            current = frame.start
        view[frame.step] = frame
    return [view[step] for step in sorted(view)]


@dataclass
class _Skipped:
    number: int = 0


def _lines(path: Path, skipped: _Skipped) -> Iterator[dict[str, Any]]:
    try:
        stream = path.open("rb")
    except OSError:
        return
    with stream:
        for raw in stream:
            if not raw.strip():
                continue
            try:
                value = orjson.loads(raw)
            except ValueError:
                skipped.number += 1
                continue
            if isinstance(value, dict):
                yield value
            else:
                skipped.number += 1


def _alarms(lines: Iterator[dict[str, Any]], skipped: _Skipped) -> list[dict[str, Any]]:
    """Return the lines that are about an alarm: with a name, and steps that are numbers where there are any."""
    found = []
    for line in lines:
        steps = (line.get("step"), line.get("since_step"), line.get("start", 1))
        if isinstance(line.get("name"), str) and all(step is None or isinstance(step, int) for step in steps):
            found.append(line)
        else:
            skipped.number += 1
    return found


def _metric_rows(lines: Iterator[dict[str, Any]], skipped: _Skipped) -> list[MetricRow]:
    rows = []
    for line in lines:
        try:
            rows.append(_metric_row(line))
        except (KeyError, TypeError, ValueError, AttributeError):
            skipped.number += 1
    return rows


def _metric_row(line: dict[str, Any]) -> MetricRow:
    samples = line.get("samples")
    # "NaN" and "Infinity" are written as strings, since JSON has no such numbers; float() reads them.
    metrics = {str(key): float(value) for key, value in line["metrics"].items()}
    return MetricRow(
        int(line["step"]),
        float(line["time"]),
        int(line.get("start", 1)),
        None if samples is None else int(samples),
        metrics,
        _after(line),
    )


def _merged(first: MetricRow, second: MetricRow) -> MetricRow:
    samples = first.samples if second.samples is None else second.samples
    return replace(first, samples=samples, metrics={**first.metrics, **second.metrics})


def _after(line: dict[str, Any]) -> int | None:
    return None if line.get("after") is None else int(line["after"])


def _routing_frames(lines: Iterator[dict[str, Any]], skipped: _Skipped) -> list[RoutingFrame]:
    frames = []
    for line in lines:
        try:
            frames.append(_routing_frame(line))
        except (KeyError, TypeError, ValueError):
            skipped.number += 1
    return merge_frames(frames)


def _routing_frame(line: dict[str, Any]) -> RoutingFrame:
    counts = np.asarray(line["tokens_per_expert"], dtype=np.int64)
    layers = np.asarray(line["layers"], dtype=np.int64)
    rms, by_source = line.get("expert_rms"), line.get("tokens_per_source")
    frame = RoutingFrame(
        int(line["step"]),
        int(line.get("start", 1)),
        layers,
        counts,
        # null: an expert without a token has no norm; numpy reads None as nan.
        None if rms is None else np.asarray(rms, dtype=np.float64),
        tuple(str(label) for label in line.get("sources") or ()),
        None if by_source is None else np.asarray(by_source, dtype=np.int64),
        _after(line),
    )
    if (
        counts.ndim != 2
        or len(layers) != len(counts)
        or (frame.expert_rms is not None and frame.expert_rms.shape != counts.shape)
    ):
        raise ValueError(counts.shape)
    return frame
