"""Helpers: options for a temporary run, and the rows that Trackio has kept."""

from __future__ import annotations

import argparse
import sqlite3
from pathlib import Path
from typing import Any

import orjson
import pytest

from megatron_ext import tracking


@pytest.fixture
def make_args(tmp_path: Path):
    """Return a function that parses our flags and adds what Megatron would have on its arguments."""

    def make(*flags: str, run: str = "moe", **megatron: Any) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        tracking.add_arguments(parser)
        args = parser.parse_args(["--moe-ext-run-dir", str(tmp_path / run), *flags])
        for name, value in {"rank": 0, "world_size": 1, "iteration": 0, **megatron}.items():
            setattr(args, name, value)
        return args

    return make


class Kept:
    """What Trackio's database holds."""

    def __init__(self, folder: Path, project: str = "megatron-moe") -> None:
        self.path = folder / f"{project}.db"

    def query(self, text: str) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(self.path)
        try:
            return connection.execute(text).fetchall()
        finally:
            connection.close()

    def runs(self) -> set[str]:
        return {name for (name,) in self.query("SELECT DISTINCT run_name FROM metrics")}

    def run_ids(self) -> set[str]:
        return {name for (name,) in self.query("SELECT DISTINCT run_id FROM metrics")}

    def rows(self, run: str = "moe") -> list[tuple[int, dict[str, Any]]]:
        found = self.query(f"SELECT step, metrics FROM metrics WHERE run_name = '{run}' ORDER BY id")
        return [(step, values) for step, text in found if "_type" not in str(values := orjson.loads(text))]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "trackio")
