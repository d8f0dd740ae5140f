"""Progress for people: a bar on a terminal, a plain line now and then in a log. Always on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 5.0


class Meter:
    """Counts bytes of input done out of `total_bytes`; use it as a context manager."""

    def __init__(self, title: str, total_bytes: int, *, quiet: bool = False) -> None:
        self._title, self._total, self._done = title, max(total_bytes, 1), 0
        self._quiet = quiet
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty() and not quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(title, total=self._total)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        elif kind is None:
            self._line()

    def advance(self, num_bytes: int) -> None:
        """Add bytes done."""
        self._done += num_bytes
        if self._bar:
            self._bar.advance(self._task, num_bytes)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._line()

    def _line(self) -> None:
        self._last_line = time.monotonic()
        if not self._quiet:
            share = 100 * self._done / self._total
            print(
                f"[tokenize] {self._title}: {self._done / 1e6:.1f} MB, {share:.0f} %",
                file=sys.stderr,
                flush=True,
            )
