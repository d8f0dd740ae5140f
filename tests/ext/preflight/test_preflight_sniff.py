"""Megatron's own sniff test prints; its outliers come out on the writing rank, in the run directory and the tracker."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_run import MOCK, MODEL, ROOT, TRAIN, environment

from megatron_ext.observe.health import standing
from megatron_ext.preflight import Outlier, SniffRelay, SniffResult, SniffWatch
from megatron_ext.preflight.sniff import LOGGER
from megatron_ext.tracking.rundir import read_alarms, read_run

BUSBW = "All-to-all busbw (EP PG, size=8, 268 MB) [GB/s]"
SLOW = Outlier(BUSBW, 11, "node-1", 39.8, -48.4)


@pytest.fixture
def ends() -> Iterator[tuple[SniffRelay, SniffRelay]]:
    """Rank 0's end, attached, and the writing rank's."""
    store = dist.HashStore()
    first = SniffRelay(store)
    first.attach()
    yield first, SniffRelay(store)
    first.detach()


def _say(tag: str, *lines: str) -> None:
    logger = logging.getLogger(LOGGER)
    for line in ("=" * 60, f"  GPU sniff test -- {tag}", "=" * 60, *lines, "  Result: whatever", "=" * 60):
        logger.info(line)


def test_results_go_from_rank_zero_to_the_writing_rank_once(ends: tuple[SniffRelay, SniffRelay]) -> None:
    last = ends[1]
    gemm = "GEMM throughput (8192x8192x8192, bf16) [TFLOP/s/GPU]"
    _say(
        "before training",
        f"  {BUSBW}: median=77.10, mean=75.00, min=39.80, max=78.00",
        "    OUTLIER rank 11 (node-1): 39.80 (-48.4%)",
        f"  {gemm}: median=700.00, mean=690.00, min=500.00, max=710.00",
        "    OUTLIER rank 3: 500.00 (-28.6%)",
    )
    assert last.drain() == [SniffResult("before training", (SLOW, Outlier(gemm, 3, "", 500.0, -28.6)))]
    assert last.drain() == []
    _say("iteration     500", f"  {BUSBW}: median=77.10, mean=77.00, min=76.00, max=78.00")
    assert last.drain() == [SniffResult("iteration     500", ())]


def test_line_format_is_the_one_that_this_megatron_prints(
    ends: tuple[SniffRelay, SniffRelay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs Megatron's own report over one test, with the other ranks and the device stood in for."""
    from megatron.training import gpu_sniff_test

    values, name = [10.0, 10.0, 10.0, 4.0], "Send/recv busbw [GB/s]"

    def gather(into: list[torch.Tensor], _: torch.Tensor) -> None:
        for slot, value in zip(into, values, strict=True):
            slot.fill_(value)

    monkeypatch.setattr(gpu_sniff_test.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(gpu_sniff_test.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(gpu_sniff_test.dist, "all_gather", gather)
    monkeypatch.setattr(gpu_sniff_test.dist, "barrier", lambda: None)
    monkeypatch.setattr(gpu_sniff_test, "_gather_hostnames", lambda: ["a", "a", "b", "b"])
    monkeypatch.setattr(gpu_sniff_test, "bench_gemms", lambda **_: [(name, 10.0)])
    for maker in ("tensor", "zeros"):
        make = getattr(torch, maker)
        monkeypatch.setattr(torch, maker, lambda *a, _make=make, **k: _make(*a, **{**k, "device": "cpu"}))
    gpu_sniff_test.run_sniff_tests(ep_group=None, dp_group=None, tag="iteration      12")
    (result,) = ends[1].drain()
    assert result.outliers == (Outlier(name, 3, "b", 4.0, -60.0),)
    assert result.step(99) == 12


class _Writer:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.alarms: list[dict[str, Any]] = []

    def scalars(self, step: int, values: Any) -> None:
        self.rows.append((step, dict(values)))

    def alarm(self, record: Any) -> None:
        self.alarms.append(dict(record))


class _Queue:
    """A relay's reading end with results to come."""

    def __init__(self, *results: SniffResult) -> None:
        self.results = list(results)

    def drain(self) -> list[SniffResult]:
        return [self.results.pop(0)] if self.results else []


def _watch(*results: SniffResult, standing: dict[str, Any] | None = None) -> tuple[_Writer, SniffWatch]:
    writer = _Writer()
    return writer, SniffWatch(_Queue(*results), writer, standing)  # type: ignore[arg-type]


def test_alarm_is_said_once_then_on_change_then_cleared_by_a_later_start() -> None:
    other = Outlier("GEMM", 3, "node-0", 500.0, -28.6)
    results = [(SLOW,), (SLOW,), (SLOW, other)]
    writer, watch = _watch(*(SniffResult(f"iteration {10 * (n + 1)}", found) for n, found in enumerate(results)))
    for step in (11, 21, 31):
        watch.step_end(step)
    said = [(record["state"], record["step"], record["since_step"], record["ranks"]) for record in writer.alarms]
    assert said == [("raised", 10, 10, [11]), ("changed", 30, 10, [3, 11])]
    assert "rank 11 (node-1)" in writer.alarms[0]["why"]
    assert writer.rows[-1] == (30, {
        "step/sniff_outliers": 2.0, "step/sniff_off/rank_3": pytest.approx(0.286),
        "step/sniff_off/rank_11": pytest.approx(0.484),
    })  # fmt: skip
    # The next start finds the alarm standing: it says it again while it lasts, and clears it when it is over.
    later, watch = _watch(SniffResult("before training", (SLOW,)), SniffResult("iteration 40", ()),
                          standing=writer.alarms[-1])  # fmt: skip
    watch.step_end(31)
    watch.step_end(41)
    said = [(record["state"], record["step"], record["since_step"]) for record in later.alarms]
    assert said == [("changed", 31, 10), ("cleared", 40, 10)]
    assert later.rows[-1] == (40, {"step/sniff_outliers": 0.0})


def test_no_outlier_and_nothing_standing_says_nothing() -> None:
    writer, watch = _watch(SniffResult("before training", ()))
    watch.step_end(1)
    assert (writer.alarms, writer.rows) == ([], [(1, {"step/sniff_outliers": 0.0})])


# Real training on three ranks; the sizes of the sniff test are made small for a CPU, and rank 1 reports half the
# matrix throughput of the others, as a throttled GPU would.
CHILD = """
import os, sys
from megatron_ext.runtime import cpu
cpu.install()
from megatron.training import gpu_sniff_test as sniff
sniff.STANDARD_GEMM_SHAPES, sniff.MSG_SIZES = [(32, 32, 32)], [1 << 10]
sniff._get_ffn_gemm_shapes = lambda: []
rank = int(os.environ["RANK"])
sniff.bench_gemms = lambda extra_shapes=None: [("GEMM throughput [TFLOP/s/GPU]", 50.0 if rank == 1 else 100.0)]
from megatron_ext.runtime.pretrain import train
train(sys.argv[1:], asked_device="cpu")
"""


def test_outlier_of_a_real_training_is_in_the_run_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "child.py").write_text(CHILD)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    flags = [*MODEL, *TRAIN, *MOCK, "--micro-batch-size", "1", "--global-batch-size", "3", "--train-iters", "3",
             "--gpu-sniff-test-interval", "3", "--moe-ext-run-dir", str(run)]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        words = [*torchrun, str(tmp_path / "child.py"), *flags]
        done = subprocess.run(words, stdout=log, stderr=log, env=environment(), cwd=ROOT, timeout=300, check=False)
    text = (tmp_path / "log").read_text()
    assert done.returncode == 0, text[-3000:]
    assert "OUTLIER rank 1" in text
    rows = {row.step: row.metrics for row in read_run(run).rows}
    # Before training, written with the first step; and after the third, written when the run closed.
    for step in (1, 3):
        assert rows[step]["step/sniff_outliers"] >= 1
        assert rows[step]["step/sniff_off/rank_1"] >= 0.5
    assert "step/sniff_outliers" not in rows[2]
    (alarm,) = [record for record in standing(read_alarms(run)) if record["name"] == "outlier_rank"]
    assert f"rank 1 ({os.uname().nodename}): GEMM throughput [TFLOP/s/GPU] 50, -50.0 %" in alarm["why"]
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
