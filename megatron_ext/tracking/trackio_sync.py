"""Bring one run directory into Trackio: once, or following a run that goes on.

Stateless: what Trackio has is read back and compared with the files, so a sync after any accident (killed,
locked, full, half imported) adds what is missing, takes out what a resumed job replaced, and does nothing
the second time.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from megatron_ext.tracking.options import TrackingOptions
from megatron_ext.tracking.rundir import (
    ALARMS_FILE,
    METRICS_FILE,
    ROUTING_FILE,
    MetricRow,
    RoutingFrame,
    RunInfo,
    merge_frames,
    merge_rows,
    parse_metric_line,
    parse_routing_line,
    read_info,
    read_run,
)
from megatron_ext.tracking.trackio_rows import (
    IMAGE_KEY,
    alarm_text,
    alarm_title,
    is_stored,
    picture,
    pictured,
    wanted,
)
from megatron_ext.tracking.trackio_tables import StoredRow, Tables

ID_KEY = "moe_ext_run_id"
# A full comparison brings in what a failed batch dropped; this often is enough.
FINISH_ATTEMPTS = 3


class SyncError(Exception):
    """Trackio did not take the rows; the text says why, in one line."""


@dataclass(frozen=True)
class SyncResult:
    """What one full comparison did: rows added, taken out, and found as they should be."""

    name: str
    added: int
    removed: int
    present: int


class Tail:
    """Reads a growing file of lines; an unfinished last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> list[bytes]:
        """Return the complete lines since the last call."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [line for line in data[:end].split(b"\n") if line.strip()]


@dataclass
class Session:
    """One process's work for one run directory. Import of Trackio happens in `open`.

    Raises (all methods): `SyncError`, `OSError`, `sqlite3.Error` or whatever Trackio raises; the caller
    retries.
    """

    options: TrackingOptions
    complaints: list[str] = field(default_factory=list)

    def open(self) -> None:
        """Import Trackio, find or name the run, and start logging to it.

        Raises:
            SyncError: Trackio refuses the run.
        """
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        warnings.showwarning = self._note_warning  # type: ignore[assignment]
        warnings.simplefilter("always")
        self._trackio: Any = trackio
        self._info = read_info(self.options.run_dir)
        self._rewind()
        self._start = self._frames = 0
        complaints = len(self.complaints)
        self.options.trackio_dir.mkdir(parents=True, exist_ok=True)
        database = SQLiteStorage.get_project_db_path(self.options.project)
        self._run = trackio.init(
            project=self.options.project,
            name=self._name(database),
            group=self.options.group or None,
            config=_config(self._info),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if len(self.complaints) > complaints:
            # With the database locked, `init` only warns and makes a second run of the same name.
            self._run.finish()
            raise SyncError(self.complaints[-1])
        self._tables = Tables(database, self._run.id)

    def follow(self) -> None:
        """Log what the files have gained since the last call."""
        for row in filter(None, map(parse_metric_line, self._metrics.lines())):
            if row.start > self._start:
                # Rows of this step and later came from weights that are gone.
                self._tables.delete_from(row.replaces)
                self._start = row.start
            self._log(row)
        for frame in filter(None, map(parse_routing_line, self._routing.lines())):
            self._frames += 1
            if pictured(self._frames, self.options.trackio_images):
                self._log_picture(frame)
        self._log_alarms(_objects(self._alarms.lines()), set())

    def reconcile(self) -> SyncResult:
        """Compare all rows with Trackio's and mend the difference; afterwards `follow` goes on from here."""
        self._rewind()
        rows = merge_rows([row for raw in self._metrics.lines() if (row := parse_metric_line(raw))])
        want = {row.step: wanted(row, self.options.trackio_keys) for row in rows}
        stored: dict[int, list[StoredRow]] = defaultdict(list)
        for one in self._tables.rows():
            if IMAGE_KEY not in one.metrics:
                stored[one.step].append(one)
        good = {
            step
            for step, found in stored.items()
            if step in want and is_stored(want[step], [one.metrics for one in found])
        }
        stale = [one.id for step, found in stored.items() if step not in good for one in found]
        self._tables.delete(stale)
        missing = [row for row in rows if row.step not in good]
        for row in missing:
            self._log(row)
        self._start = max((row.start for row in rows), default=0)
        self._reconcile_pictures()
        self._log_alarms(_objects(self._alarms.lines()), self._tables.alerts())
        return SyncResult(self._run.name, len(missing), len(stale), len(good))

    def finish(self) -> SyncResult:
        """Log the rest, close Trackio's run and make sure that all is there.

        Raises:
            SyncError: Rows are still missing after a few attempts.
        """
        self._run.finish()
        first: SyncResult | None = None
        for _ in range(FINISH_ATTEMPTS):
            self.open()
            result = self.reconcile()
            self._run.finish()
            first = first or result
            if not result.added and not result.removed:
                return first
        raise SyncError(self.complaints[-1] if self.complaints else "Trackio did not keep the rows")

    def _rewind(self) -> None:
        self._metrics = Tail(self.options.run_dir / METRICS_FILE)
        self._routing = Tail(self.options.run_dir / ROUTING_FILE)
        self._alarms = Tail(self.options.run_dir / ALARMS_FILE)

    def _reconcile_pictures(self) -> None:
        frames = merge_frames([frame for raw in self._routing.lines() if (frame := parse_routing_line(raw))])
        self._frames = len(frames)
        chosen = {
            frame.step: frame for index, frame in enumerate(frames, 1) if pictured(index, self.options.trackio_images)
        }
        stored = {one.step: one.id for one in self._tables.rows() if IMAGE_KEY in one.metrics}
        self._tables.delete([number for step, number in stored.items() if step not in chosen])
        for step, frame in chosen.items():
            if step not in stored:
                self._log_picture(frame)

    def _log(self, row: MetricRow) -> None:
        self._run.log(wanted(row, self.options.trackio_keys), step=row.step)

    def _log_picture(self, frame: RoutingFrame) -> None:
        scale = "brightest is 4 times the layer's mean or more"
        caption = f"step {frame.step}: a row a layer, a column an expert; {scale}"
        self._run.log({IMAGE_KEY: self._trackio.Image(picture(frame), caption=caption)}, step=frame.step)

    def _log_alarms(self, records: Sequence[dict[str, Any]], known: set[tuple[str, int]]) -> None:
        for record in records:
            title, step = alarm_title(record), int(record.get("step") or record.get("since_step") or 0)
            if (title, step) not in known:
                level = (
                    self._trackio.AlertLevel.INFO if record.get("state") == "cleared" else self._trackio.AlertLevel.WARN
                )
                self._run.alert(title, text=alarm_text(record), level=level, step=step)

    def _name(self, database: Path) -> str:
        """Return the run's name in Trackio: its own if it is there, else one that no directory has."""
        taken = set()
        # Api.runs raises for a project that nothing was logged to yet.
        for run in self._trackio.Api().runs(self.options.project) if database.exists() else ():
            if self._info.id and (run.config or {}).get(ID_KEY) == self._info.id:
                return str(run.name)
            taken.add(str(run.name))
        name = self.options.run_name
        return f"{name}-{self._info.id[:6]}" if name in taken and self._info.id else name

    def _note_warning(self, message: object, category: type[Warning], *_: object) -> None:
        # Deprecations of the libraries below are not for the user of a training run.
        if issubclass(category, UserWarning):
            self.complaints.append(str(message).splitlines()[0])


def import_run(options: TrackingOptions) -> SyncResult:
    """Bring a run directory into Trackio, once.

    Raises:
        SyncError: Trackio did not keep all rows.
        UserError: The directory holds no run.
    """
    read_run(options.run_dir, routing=False)
    session = Session(options)
    session.open()
    first = session.reconcile()
    again = session.finish()
    if again.added or again.removed:
        # The first pass was not kept whole and finish mended it; count each row once.
        return SyncResult(first.name, first.added, first.removed, first.present)
    return first


def _config(info: RunInfo) -> dict[str, Any]:
    """Return the run's configuration for Trackio, which refuses keys that start with an underscore."""
    config = {key: value for key, value in info.config.items() if not key.startswith("_")}
    return {
        **config,
        "pins": info.pins,
        "command": " ".join(info.command),
        "world_size": info.world_size,
        ID_KEY: info.id,
    }


def _objects(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    found = []
    for raw in lines:
        try:
            value = orjson.loads(raw)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
