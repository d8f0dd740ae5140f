"""Opening a run directory: the lock that keeps a second writer out, and run.json with this start in it."""

from __future__ import annotations

import argparse
import enum
import fcntl
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.tracking.lines import write_json
from megatron_ext.tracking.options import TrackingOptions
from megatron_ext.tracking.rundir import (
    METRICS_FILE,
    RUN_FILE,
    SCHEMA,
    RunInfo,
    Start,
    parse_metric_line,
    read_info,
)

LOCK_FILE = ".writer.lock"
# A row of a thousand keys is about 40 kB.
TAIL_BYTES = 1 << 20


class Opened:
    """One start of a run: its number (from 1), the lock, and run.json's content."""

    def __init__(self, run_dir: Path, info: RunInfo, args: argparse.Namespace, lock: int | None) -> None:
        self.info = info
        self.number = len(info.starts)
        self._run_dir = run_dir
        self._args = args
        self._lock = lock
        self._saved: RunInfo | None = None
        self.save()

    def note_first_step(self) -> None:
        """Take down the iteration that the checkpoint gave, known only once training runs."""
        if self.info.starts[-1].iteration is None:
            iteration = getattr(self._args, "iteration", None)
            last = Start(self.info.starts[-1].time, int(iteration) if iteration is not None else -1)
            self.info = RunInfo(**{**_fields(self.info), "starts": (*self.info.starts[:-1], last)})

    @property
    def after(self) -> int | None:
        """The step that this start resumed from; None for the first start, and where that isn't known."""
        iteration = self.info.starts[-1].iteration
        return iteration if self.number > 1 and iteration is not None and iteration >= 0 else None

    def save(self) -> None:
        """Write run.json if it changed; a failure waits for the next call."""
        if self.info is self._saved:
            return
        info = self.info
        try:
            write_json(self._run_dir / RUN_FILE, {"schema": SCHEMA, **_plain_info(info)})
            self._saved = info
        except OSError:
            pass

    def close(self) -> None:
        """Save and release the lock."""
        self.save()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def open_start(options: TrackingOptions, args: argparse.Namespace, pins: Mapping[str, Any]) -> Opened:
    """Add a start to run.json, making the directory where needed.

    Args:
        options: Names and places.
        args: Megatron's arguments: the configuration to record.
        pins: What the tree was made from.

    Raises:
        UserError: Another live process holds the directory.
    """
    lock = _lock(options.run_dir)
    before = read_info(options.run_dir)
    info = RunInfo(
        id=before.id or uuid.uuid4().hex,
        name=options.run_name,
        group=options.group,
        project=options.project,
        command=tuple(sys.argv),
        config=plain(vars(args)),
        pins=plain(dict(pins)),
        world_size=int(getattr(args, "world_size", 1)),
        starts=(*_earlier_starts(options.run_dir, before), Start(round(time.time(), 3))),
    )
    return Opened(options.run_dir, info, args, lock)


def plain(value: Any) -> Any:
    """Return `value` as JSON-ready data: enums by name, dtypes and paths as text, functions by name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return str(value)


def _earlier_starts(run_dir: Path, before: RunInfo) -> Sequence[Start]:
    """Return the starts so far; if run.json was lost, as many as the metrics speak of."""
    last = 0
    try:
        with (run_dir / METRICS_FILE).open("rb") as stream:
            stream.seek(-min(TAIL_BYTES, stream.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = stream.read(TAIL_BYTES).split(b"\n")
            rows = [row for raw in lines if (row := parse_metric_line(raw))]
            last = max((row.start for row in rows), default=0)
    except OSError:
        pass
    return (*before.starts, *(Start(0.0, -1) for _ in range(last - len(before.starts))))


def _lock(run_dir: Path) -> int | None:
    """Take the directory's lock; None where the folder or its file system offers none."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            "another process is writing into this run directory",
            where=f"--moe-ext-run-dir {run_dir}",
            why="two runs in one directory would mix their curves",
            remedy="wait for it, stop it, or name another directory",
        ) from None
    except OSError:
        pass  # a file system without locks: go on without
    return descriptor


def _plain_info(info: RunInfo) -> dict[str, Any]:
    starts: Sequence[dict[str, Any]] = [{"time": one.time, "iteration": one.iteration} for one in info.starts]
    return {**_fields(info), "command": list(info.command), "starts": starts}


def _fields(info: RunInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in RunInfo.__dataclass_fields__}
