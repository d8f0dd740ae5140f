"""Outlier ranks of Megatron's own hardware check (`--gpu-sniff-test-interval`), for the tracker.

Megatron prints them on rank 0 with its logger, while the run's writer sits on the last rank. Rank 0 therefore puts them
into the process group's key-value store, and the writing rank takes them out at the end of a step; no collective is
needed.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass
from typing import Protocol

LOGGER = "megatron.training.gpu_sniff_test"
_KEY = "moe-ext/sniff"
_METRIC = re.compile(r"^\s*(?P<name>\S.*?): median=(?P<median>[-\d.]+), mean=")
_OUTLIER = re.compile(
    r"OUTLIER rank (?P<rank>\d+)(?: \((?P<node>[^)]*)\))?: (?P<value>[-\d.]+) \((?P<share>[-+\d.]+)%\)"
)


class Store(Protocol):
    """What is used of torch.distributed's store."""

    def set(self, key: str, value: str, /) -> None:
        """Keep a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value, waiting for it."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return it."""


@dataclass(frozen=True)
class Outlier:
    """A rank that was off the median: the metric as Megatron names it, its value, and by how much in per cent."""

    metric: str
    rank: int
    node: str
    value: float
    off_percent: float


class SniffRelay(logging.Handler):
    """Reads rank 0's log lines into the store (`attach`), and returns what is new on the writing rank (`drain`)."""

    def __init__(self, store: Store) -> None:
        super().__init__(level=logging.INFO)
        self._store = store
        self._metric = ""
        self._seen = 0

    def attach(self) -> None:
        """Listen to Megatron's sniff test; call it on rank 0."""
        logger = logging.getLogger(LOGGER)
        logger.addHandler(self)
        if logger.getEffectiveLevel() > logging.INFO:
            # The metric's name is in an INFO line, and a root at WARNING would swallow it.
            logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Take one line of the log."""
        line = record.getMessage()
        if found := _METRIC.match(line):
            self._metric = found["name"]
        elif found := _OUTLIER.search(line):
            outlier = Outlier(
                self._metric, int(found["rank"]), found["node"] or "", float(found["value"]), float(found["share"])
            )
            number = self._store.add(f"{_KEY}/next", 1)
            self._store.set(f"{_KEY}/{number}", json.dumps(asdict(outlier)))
            # Counted only once it can be read, so that a reader never waits.
            self._store.add(f"{_KEY}/ready", 1)

    def drain(self) -> list[Outlier]:
        """Return the outliers since the last call; call it on the writing rank."""
        ready = self._store.add(f"{_KEY}/ready", 0)
        numbers = range(self._seen + 1, ready + 1)
        self._seen = ready
        return [Outlier(**json.loads(self._store.get(f"{_KEY}/{number}"))) for number in numbers]
