"""Outlier ranks of Megatron's own hardware check (`--gpu-sniff-test-interval`), for the run directory and the tracker.

Megatron prints them on rank 0 with its logger, while the run's writer sits on the last rank. Rank 0 therefore puts the
result of each test into the process group's key-value store, and the writing rank takes it out at the end of a step; no
collective is needed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from megatron_ext.observe.names import ALARMS, step_key
from megatron_ext.observe.sink import CHANGED, CLEARED, RAISED, AlarmRecord

LOGGER = "megatron.training.gpu_sniff_test"
ALARM = "outlier_rank"
_KEY = "moe-ext/sniff"
_HEAD = re.compile(r"^\s*GPU sniff test(?: -- (?P<tag>.*?))?\s*$")
_TEST = re.compile(r"^\s*(?P<name>\S.*?): median=(?P<median>[-\d.]+), mean=")
_OUTLIER = re.compile(
    r"OUTLIER rank (?P<rank>\d+)(?: \((?P<node>[^)]*)\))?: (?P<value>[-\d.]+) \((?P<share>[-+\d.]+)%\)"
)
_END = re.compile(r"^\s*Result: ")
_ITERATION = re.compile(r"iteration +(\d+)")

logger = logging.getLogger("megatron_ext.preflight")


class Store(Protocol):
    """What is used of torch.distributed's store."""

    def set(self, key: str, value: str, /) -> None:
        """Keep a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value, waiting for it."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return it."""


class Writer(Protocol):
    """What is used of the run's writer."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take metrics of a step."""

    def alarm(self, record: Mapping[str, object]) -> None:
        """Take a change of an alarm."""


@dataclass(frozen=True)
class Outlier:
    """A rank that was off the median: the test as Megatron names it, its value, and by how much in per cent."""

    test: str
    rank: int
    node: str
    value: float
    off_percent: float

    def words(self) -> str:
        """Return a line for people."""
        node = f" ({self.node})" if self.node else ""
        return f"rank {self.rank}{node}: {self.test} {self.value:g}, {self.off_percent:+.1f} % of the median"


@dataclass(frozen=True)
class SniffResult:
    """One run of the sniff test: Megatron's tag ("before training", "iteration 500") and who was off."""

    tag: str
    outliers: tuple[Outlier, ...]

    def step(self, otherwise: int) -> int:
        """Return the step that the tag names, else `otherwise`."""
        found = _ITERATION.search(self.tag)
        return int(found[1]) if found else otherwise


class SniffRelay(logging.Handler):
    """Reads rank 0's log lines into the store (`attach`), and returns what is new on the writing rank (`drain`)."""

    def __init__(self, store: Store) -> None:
        super().__init__(level=logging.INFO)
        self._store = store
        self._tag = self._test = ""
        self._outliers: list[Outlier] = []
        self._seen = 0

    def attach(self) -> None:
        """Listen to Megatron's sniff test; call it on rank 0."""
        source = logging.getLogger(LOGGER)
        source.addHandler(self)
        if source.getEffectiveLevel() > logging.INFO:
            # The test's name is in an INFO line, and a root at WARNING would swallow it.
            source.setLevel(logging.INFO)

    def detach(self) -> None:
        """Stop listening."""
        logging.getLogger(LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take one line of the log; the last line of a test puts its result into the store."""
        line = record.getMessage()
        if found := _HEAD.match(line):
            self._tag, self._outliers = found["tag"] or "", []
        elif found := _TEST.match(line):
            self._test = found["name"]
        elif found := _OUTLIER.search(line):
            self._outliers.append(
                Outlier(
                    self._test, int(found["rank"]), found["node"] or "", float(found["value"]), float(found["share"])
                )
            )
        elif _END.match(line):
            self._send(SniffResult(self._tag, tuple(self._outliers)))

    def drain(self) -> list[SniffResult]:
        """Return the results since the last call; call it on the writing rank."""
        ready = self._store.add(f"{_KEY}/ready", 0)
        numbers = range(self._seen + 1, ready + 1)
        self._seen = ready
        return [_result(json.loads(self._store.get(f"{_KEY}/{number}"))) for number in numbers]

    def _send(self, result: SniffResult) -> None:
        try:
            number = self._store.add(f"{_KEY}/next", 1)
            self._store.set(f"{_KEY}/{number}", json.dumps(asdict(result)))
            # Counted only once it can be read, so that a reader never waits.
            self._store.add(f"{_KEY}/ready", 1)
        except RuntimeError as error:
            # A lost store ends the run soon enough; a log line must not end it first.
            logger.warning("a sniff test's result did not reach the tracker: %s", error)


class SniffWatch:
    """Writes the results of sniff tests as metrics and as one alarm that names the ranks.

    Args:
        relay: The way from rank 0.
        writer: The run's writer; None on the ranks that only listen, or do nothing.
        standing: The alarm's last record in this run directory if it still stood there, so that a later start can clear
            it.
    """

    def __init__(self, relay: SniffRelay, writer: Writer | None, standing: Mapping[str, Any] | None = None) -> None:
        self._relay = relay
        self._writer = writer
        # Without its ranks: a new start says again what it finds, as readers drop what a resumed run ran twice.
        self._standing = {**standing, "ranks": None} if standing else None

    def step_end(self, step: int) -> None:
        """Write what tests have found since the last call; does nothing on a rank without a writer."""
        if self._writer is None:
            return
        for result in self._relay.drain():
            self._write(self._writer, result, result.step(step))

    def close(self, step: int) -> None:
        """Write what is left and stop listening."""
        self._relay.detach()
        self.step_end(step)

    def _write(self, writer: Writer, result: SniffResult, step: int) -> None:
        ranks = sorted({outlier.rank for outlier in result.outliers})
        worst = {rank: max(abs(o.off_percent) for o in result.outliers if o.rank == rank) / 100 for rank in ranks}
        writer.scalars(
            step,
            {step_key("sniff_outliers"): float(len(ranks))}
            | {step_key("sniff_off", f"rank_{rank}"): share for rank, share in worst.items()},
        )
        record = self._record(result, step, ranks)
        if record is not None:
            logger.warning(record.line())
            writer.alarm({**record.as_json(), "ranks": ranks})

    def _record(self, result: SniffResult, step: int, ranks: list[int]) -> AlarmRecord | None:
        before, alarm = self._standing, ALARMS[ALARM]
        if not ranks:
            self._standing = None
            if before is None:
                return None
            said = {name: before[name] for name in AlarmRecord.__dataclass_fields__}
            return AlarmRecord(**{**said, "state": CLEARED, "step": step, "value": 0.0})
        if before is not None and before["ranks"] == ranks:
            return None
        record = AlarmRecord(
            name=ALARM, state=CHANGED if before else RAISED, step=step,
            since_step=before["since_step"] if before else step, layer=None, expert=None, rank=None,
            metric=alarm.metric, value=float(len(ranks)), limit=0.0,
            why="; ".join(outlier.words() for outlier in result.outliers) + ". " + alarm.why,
            remedy=alarm.remedy, link=alarm.link,
        )  # fmt: skip
        self._standing = {**record.as_json(), "ranks": ranks}
        return record


def watch(interval: int | None, writer: Writer | None, alarms: list[dict[str, Any]]) -> SniffWatch | None:
    """Start watching on this rank where `--gpu-sniff-test-interval` asks for tests; None where it doesn't.

    Args:
        interval: `args.gpu_sniff_test_interval`.
        writer: The run's writer on the writing rank, else None.
        alarms: The records in the run directory's alarms.jsonl so far, on the writing rank.
    """
    import torch.distributed as dist

    if interval is None or not dist.is_initialized():
        return None
    relay = SniffRelay(dist.distributed_c10d._get_default_store())
    if dist.get_rank() == 0:
        relay.attach()
    last = next((record for record in reversed(alarms) if record["name"] == ALARM), None)
    standing = last if last is not None and last.get("state") != CLEARED else None
    return SniffWatch(relay, writer, standing)


def _result(plain: Mapping[str, Any]) -> SniffResult:
    return SniffResult(plain["tag"], tuple(Outlier(**outlier) for outlier in plain["outliers"]))
