"""The process that feeds Trackio from a run directory: `python -m megatron_ext.tracking.feed OPTIONS
[--once]`.

OPTIONS is `TrackingOptions.to_plain()` as JSON. Without `--once` it follows the run until its stdin ends,
which it does when training ends (and says so) or dies. Speaks to its parent in lines on stdout: `notice: ...`, and
with `--once` one of JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from megatron_ext.errors import UserError
from megatron_ext.tracking.feeder import NOTICE
from megatron_ext.tracking.options import TrackingOptions
from megatron_ext.tracking.trackio_sync import Session, SyncError, import_run

TICK_S = 1.0
RETRY_S = 15.0
LOCK_WAIT_S = 45.0
LOCK_FILE = ".trackio.lock"
EXIT_FAILED = 3


def main(argv: list[str]) -> int:
    """Feed one run directory; return 0, or 3 when Trackio did not take everything (a notice said why)."""
    options = TrackingOptions.from_plain(json.loads(argv[0]))
    parent = _quiet_stdout()
    with _only_feeder(options.run_dir):
        if "--once" in argv:
            return _once(options, parent)
        return _Following(options, parent).run()


class _Following:
    """The loop beside a live run: every error is told once and tried again."""

    def __init__(self, options: TrackingOptions, parent: TextIO) -> None:
        self._session = Session(options)
        self._parent = parent
        self._told = False
        self._opened = False
        self._clean = False
        self._next = 0.0
        self._complaints = 0

    def run(self) -> int:
        ended = False
        while not ended:
            ended = _stdin_ended(TICK_S)
            if time.monotonic() >= self._next or ended:
                self._attempt(self._tick)
        return 0 if self._attempt(self._finish) else EXIT_FAILED

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            work()
            return True
        except ModuleNotFoundError as error:
            self._tell(f"Trackio is not usable here: {error}")
        except Exception as error:
            self._tell(f"Trackio does not take rows: {_one_line(error)}")
        self._clean = False
        self._next = time.monotonic() + RETRY_S
        return False

    def _tick(self) -> None:
        if not self._opened:
            self._session.open()
            self._opened = True
        if self._clean:
            self._session.follow()
        else:
            self._session.reconcile()
            self._clean = True
        if len(self._session.complaints) > self._complaints:
            # A batch was dropped: compare all rows at the next turn.
            self._complaints = len(self._session.complaints)
            raise SyncError(self._session.complaints[-1])

    def _finish(self) -> None:
        if not self._opened:
            self._session.open()
            self._opened = True
        self._session.finish()

    def _tell(self, message: str) -> None:
        if not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                print(f"{NOTICE}{message}", file=self._parent, flush=True)


def _once(options: TrackingOptions, parent: TextIO) -> int:
    try:
        result = import_run(options)
    except ModuleNotFoundError as error:
        print(f"{NOTICE}Trackio is not usable here: {error}", file=parent, flush=True)
        return EXIT_FAILED
    except UserError as error:
        print(f"{NOTICE}{error.what}: {error.where}", file=parent, flush=True)
        return EXIT_FAILED
    except Exception as error:
        print(f"{NOTICE}Trackio does not take rows: {_one_line(error)}", file=parent, flush=True)
        return EXIT_FAILED
    print(json.dumps(asdict(result)), file=parent, flush=True)
    return 0


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _quiet_stdout() -> TextIO:
    """Keep stdout for our own lines: Trackio prints there."""
    parent = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    return parent


def _stdin_ended(wait_s: float) -> bool:
    ready, _, _ = select.select([0], [], [], wait_s)
    # The word END and the end of the pipe mean the same.
    return bool(ready)


@contextlib.contextmanager
def _only_feeder(run_dir: Path) -> Iterator[None]:
    """Hold the run's feeding lock: the child of a killed start may still be finishing."""
    try:
        stream = (run_dir / LOCK_FILE).open("w")
    except OSError:
        yield
        return
    with stream:
        give_up = time.monotonic() + LOCK_WAIT_S
        while time.monotonic() < give_up:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.2)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
