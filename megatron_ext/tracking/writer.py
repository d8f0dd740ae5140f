"""`RunWriter`: the only writer of a run directory. It never blocks or fails a training step; a checkpoint waits for it.

The training thread hands over plain values; a thread of our own writes them. A second process feeds Trackio
from the files (`feeder.py`), so whatever happens there cannot reach training.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megatron_ext.tracking import options as tracking_options
from megatron_ext.tracking import start
from megatron_ext.tracking.appender import Appender
from megatron_ext.tracking.feeder import TrackioFeeder
from megatron_ext.tracking.lines import alarm_line, metric_line, routing_line, write_json
from megatron_ext.tracking.options import TrackingOptions
from megatron_ext.tracking.rundir import (
    ALARMS_FILE,
    METRICS_FILE,
    ROUTING_FILE,
    STATE_FILE,
    live_alarms,
    read_alarms,
)

log = logging.getLogger("megatron_ext.tracking")

# About a minute of rows at 100 steps a second; beyond that something is wrong and rows are dropped, not
# steps slowed.
QUEUE_ITEMS = 4096
# An open row is written after this long without news, so that the last step of a hung run is on the disk.
IDLE_FLUSH_S = 2.0
# The monitor delivers a sample up to a step or two later; a row written before only becomes two lines.
OPEN_ROWS = 3
CLOSE_WAIT_S = 10.0
# A checkpoint waits no longer than this for its rows.
FLUSH_WAIT_S = 10.0


class RunWriter:
    """Writes metrics, routing and alarms of one run; see docs/architecture.md for the files.

    All methods may be called from any thread, and all but `flush` and `close` return at once. Satisfies the sink
    Protocol of `megatron_ext.observe`.

    Args:
        options: The run directory and Trackio's place.
        opened: The start that this process is (from `start.open_start`).
    """

    def __init__(self, options: TrackingOptions, opened: start.Opened) -> None:
        self.run_dir: Path = options.run_dir
        self._opened = opened
        self._rows: dict[int, _OpenRow] = {}
        self._last: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[str, Any] | None] = queue.Queue(maxsize=QUEUE_ITEMS)
        self._files = {name: Appender(options.run_dir / name) for name in (METRICS_FILE, ROUTING_FILE, ALARMS_FILE)}
        self._warned: set[str] = set()
        self._closed = False
        self._feeder = TrackioFeeder(options) if options.trackio else None
        self._thread = threading.Thread(target=self._work, name="megatron-moe-tracking", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def from_args(cls, args: argparse.Namespace, pins: Mapping[str, Any]) -> RunWriter | None:
        """Open the run directory on the writing rank (the last one, as Megatron's own writers).

        Args:
            args: Megatron's parsed arguments with ours.
            pins: What the tree was made from, kept in run.json.

        Returns:
            The writer; None on the other ranks and where no run directory is named.

        Raises:
            UserError: The options are wrong, or another live process writes into the directory.
        """
        options = tracking_options.from_args(args)
        rank, world_size = int(getattr(args, "rank", 0)), int(getattr(args, "world_size", 1))
        if options is None or rank != world_size - 1:
            return None
        return cls(options, start.open_start(options, args, pins))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add scalars to the row of `step`; the rows of the last few steps are open, as the monitor is late."""
        with self._lock:
            row = self._rows.get(step)
            if row is None:
                row = self._rows[step] = _OpenRow(int(step), self._opened.number)
                self._opened.note_first_step()
            row.metrics.update(values)
            row.touched = time.monotonic()
            self._last.update((key, (int(step), value)) for key, value in values.items())
            while len(self._rows) > OPEN_ROWS:
                self._put("metrics", self._rows.pop(min(self._rows)))

    def samples(self, step: int, consumed: int) -> None:
        """Note the training samples consumed by `step` (the x axis that survives an upcycling)."""
        with self._lock:
            if step in self._rows:
                self._rows[step].samples = consumed

    def routing(
        self,
        step: int,
        layers: Sequence[int],
        tokens_per_expert: np.ndarray,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Record assignments to every expert, summed over all ranks.

        Args:
            step: The step that was sampled.
            layers: Global layer numbers from 0, [L].
            tokens_per_expert: int64 [L, E]; copied, so the caller may reuse it.
            extra: More fields of the line, ready for JSON (docs/architecture.md); handed over, not copied.
        """
        counts = np.array(tokens_per_expert, dtype=np.int64, copy=True)
        self._put("routing", (int(step), [int(layer) for layer in layers], counts, dict(extra or {})))

    def last(self, key: str) -> tuple[int, float] | None:
        """Return step and value of a scalar as last written (Megatron's own tags included); None if never."""
        with self._lock:
            return self._last.get(key)

    def alarm(self, record: Mapping[str, object]) -> None:
        """Record a change of an alarm (raised or cleared), as plain values."""
        self._put("alarm", dict(record))

    def earlier_alarms(self) -> Sequence[Mapping[str, Any]]:
        """Return the alarm records of earlier starts, in order, without steps that a later start ran again."""
        resumed = {number: one.iteration for number, one in enumerate(self._opened.info.starts, start=1)}
        begun = {number: after + 1 for number, after in resumed.items() if after is not None and after >= 0}
        earlier = [record for record in read_alarms(self.run_dir) if record.get("start", 1) < self._opened.number]
        return live_alarms(earlier, begun)

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Keep the alarms' memory for a resumed run; replaces the last one."""
        self._put("state", dict(state))

    def load_state(self) -> Mapping[str, Any] | None:
        """Return what `save_state` kept last; None if there is nothing or it cannot be read."""
        try:
            state = orjson.loads((self.run_dir / STATE_FILE).read_bytes())
        except (OSError, ValueError):
            return None
        return state if isinstance(state, dict) else None

    def flush(self) -> None:
        """Write everything so far, open rows too, and wait until it is in the files, `FLUSH_WAIT_S` at most.

        What comes later for the same steps becomes a further line of their rows. Lines that the disk refuses stay in
        memory, as always.
        """
        with self._lock:
            if self._closed:
                return
            self._put_rows()
        written = threading.Event()
        self._put("flush", written)
        if not written.wait(FLUSH_WAIT_S):
            self._warn("flush", "the run directory's disk is too slow; a checkpoint did not wait for its rows")

    def close(self) -> None:
        """Write what is left, let Trackio catch up, stop. Calling it again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._put_rows()
        atexit.unregister(self.close)
        try:
            self._queue.put(None, timeout=CLOSE_WAIT_S)
        except queue.Full:
            self._warn("slow", "the run directory's disk is too slow; some rows of this run are not on it")
        self._thread.join(timeout=CLOSE_WAIT_S)
        if self._feeder is not None:
            self._feeder.close()
            self._report_feeder()
        self._opened.close()

    def _put_rows(self) -> None:
        for step in sorted(self._rows):
            self._put("metrics", self._rows.pop(step))

    # Below: the thread's side.

    def _put(self, kind: str, item: Any) -> None:
        try:
            self._queue.put_nowait((kind, item))
        except queue.Full:
            self._warn("full", "the run directory's disk is too slow; some rows are left out")

    def _work(self) -> None:
        rounds = time.monotonic() + IDLE_FLUSH_S
        while True:
            try:
                work = self._queue.get(timeout=IDLE_FLUSH_S)
            except queue.Empty:
                work = ("rounds", None)
            try:
                if work is None:
                    self._flush(force=True)
                    return
                self._write(*work)
                if time.monotonic() > rounds:
                    self._make_rounds()
                    rounds = time.monotonic() + IDLE_FLUSH_S
            except Exception as error:
                # Whatever a value was, the thread must live on: the next row may be fine.
                self._warn("row", f"a row could not be written: {type(error).__name__}: {error}")

    def _write(self, kind: str, item: Any) -> None:
        if kind == "metrics":
            after = self._opened.after
            self._append(METRICS_FILE, metric_line(item.step, item.start, item.samples, item.metrics, after=after))
            self._opened.save()
        elif kind == "routing":
            self._append(ROUTING_FILE, routing_line(self._opened.number, *item, after=self._opened.after))
        elif kind == "alarm":
            self._append(ALARMS_FILE, alarm_line(self._opened.number, item))
        elif kind == "state":
            write_json(self.run_dir / STATE_FILE, item)
        elif kind == "flush":
            for file in self._files.values():
                file.flush(force=True)
            self._report_files()
            item.set()

    def _append(self, name: str, line: bytes) -> None:
        self._files[name].append(line)
        self._report_files()

    def _make_rounds(self) -> None:
        with self._lock:
            for step, row in sorted(self._rows.items()):
                if time.monotonic() - row.touched > IDLE_FLUSH_S:
                    self._put("metrics", self._rows.pop(step))
        self._flush(force=False)
        self._report_feeder()

    def _flush(self, *, force: bool) -> None:
        for file in self._files.values():
            file.flush(force=force)
        self._opened.save()
        self._report_files()
        if force:
            left = sum(file.waiting + file.lost for file in self._files.values())
            if left:
                self._warn("lost", f"{left} lines could not be written to {self.run_dir} and are lost")

    def _report_files(self) -> None:
        for file in self._files.values():
            if file.error:
                self._warn(
                    "file",
                    f"{file.path} cannot be written ({file.error}); training goes on, lines wait in memory",
                )

    def _report_feeder(self) -> None:
        for message in self._feeder.news() if self._feeder is not None else ():
            self._warn(
                "trackio",
                f"{message}; training goes on and {METRICS_FILE} keeps every line. Later: "
                f"megatron-moe report --import {self.run_dir}",
            )

    def _warn(self, subject: str, message: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            log.warning("tracking: %s", message)


class _OpenRow:
    """The row of the step that is going on."""

    def __init__(self, step: int, start_number: int) -> None:
        self.step = step
        self.start = start_number
        self.samples: int | None = None
        self.metrics: dict[str, float] = {}
        self.touched = time.monotonic()
