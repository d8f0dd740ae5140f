"""Trackio's SQLite tables, read back and pruned: the only module that knows them (checked on 0.42.0).

Trackio's public calls write, but they neither say what arrived (a failed batch is dropped with a warning)
nor take rows out again, which a resumed run needs. Columns used: metrics(id, run_id, step, metrics),
alerts(run_id, title, step).
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

BUSY_S = 15.0


@dataclass(frozen=True)
class StoredRow:
    """One row of Trackio's metrics table, as stored: nan and infinities are text, images are objects."""

    id: int
    step: int
    metrics: dict[str, Any]


class Tables:
    """One run's rows in one project's database.

    Args:
        database: The file; it may not exist yet.
        run_id: Trackio's id of the run.

    All methods raise `sqlite3.Error` where the database is locked, broken or has other columns than known
    here.
    """

    def __init__(self, database: Path, run_id: str) -> None:
        self._database = database
        self._run_id = run_id

    def rows(self) -> list[StoredRow]:
        """Return the run's rows in order of arrival."""
        found = self._select("SELECT id, step, metrics FROM metrics WHERE run_id = ? ORDER BY id")
        return [StoredRow(int(number), int(step), orjson.loads(text)) for number, step, text in found]

    def alerts(self) -> set[tuple[str, int]]:
        """Return (title, step) of the run's alerts."""
        found = self._select("SELECT title, step FROM alerts WHERE run_id = ?")
        return {(str(title), int(step or 0)) for title, step in found}

    def delete(self, ids: Sequence[int]) -> None:
        """Take rows out by id."""
        if not ids:
            return
        with self._connection() as connection:
            connection.executemany("DELETE FROM metrics WHERE id = ?", [(number,) for number in ids])

    def delete_from(self, step: int) -> None:
        """Take out all rows of `step` and later: a resumed job is about to write them again."""
        if not self._database.exists():
            return
        with self._connection() as connection:
            connection.execute("DELETE FROM metrics WHERE run_id = ? AND step >= ?", (self._run_id, step))

    def _select(self, query: str) -> list[tuple[Any, ...]]:
        if not self._database.exists():
            return []
        give_up = time.monotonic() + BUSY_S
        while True:
            try:
                with self._connection() as connection:
                    return connection.execute(query, (self._run_id,)).fetchall()
            except sqlite3.OperationalError as error:
                # Another run of the project may be making the database right now: file first, then table by table.
                if not str(error).startswith("no such table") or time.monotonic() > give_up:
                    raise
            time.sleep(0.1)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._database, timeout=BUSY_S)
        try:
            with connection:
                yield connection
        finally:
            connection.close()
