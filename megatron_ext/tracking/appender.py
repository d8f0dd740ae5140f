"""Append whole lines to a file that may be full, gone or read-only, without ever raising.

Lines that cannot be written wait in memory, up to a limit, and go out when the file can be written again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

# Enough for hours of rows; a training process must not grow by gigabytes because a disk is full.
BACKLOG_BYTES = 32 << 20
RETRY_S = 5.0


class Appender:
    """Appends lines to one file, in order; keeps what it cannot write.

    Attributes:
        lost: Lines given up because the backlog was full.
        error: Why the last attempt failed, empty when it did not.
    """

    def __init__(self, path: Path, *, backlog_bytes: int = BACKLOG_BYTES, retry_s: float = RETRY_S) -> None:
        self.path = path
        self.lost = 0
        self.error = ""
        self._limit = backlog_bytes
        self._retry_s = retry_s
        self._next_try = 0.0
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        # A killed predecessor may have left half a line: never write onto its end.
        self._torn = _ends_torn(path)

    @property
    def waiting(self) -> int:
        """Lines not on the disk yet."""
        return len(self._waiting)

    def append(self, line: bytes) -> None:
        """Write one line (without its newline), or keep it for later."""
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        while self._waiting_bytes > self._limit and len(self._waiting) > 1:
            self._waiting_bytes -= len(self._waiting.popleft())
            self.lost += 1
        self.flush()

    def flush(self, *, force: bool = False) -> bool:
        """Write what waits; return whether nothing is left. After a failure it waits, unless forced."""
        if not self._waiting:
            return True
        if self.error and not force and time.monotonic() < self._next_try:
            return False
        try:
            self._write()
            self.error = ""
        except OSError as error:
            self.error = error.strerror or str(error)
            self._next_try = time.monotonic() + self._retry_s
        return not self._waiting

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Opened each time: a folder that was replaced, or a network mount that came back, is then found
        # again.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            while self._waiting:
                line = self._waiting[0]
                data = (b"\n" if self._torn else b"") + line + b"\n"
                written = os.write(descriptor, data)
                self._torn = written != len(data)
                if self._torn:
                    # A short write means a full disk or a size limit; the next attempt says which.
                    continue
                self._waiting_bytes -= len(line)
                self._waiting.popleft()
        finally:
            os.close(descriptor)


def _ends_torn(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            stream.seek(-1, os.SEEK_END)
            return stream.read(1) != b"\n"
    except OSError:
        return False
