"""A real trace of real Megatron on two ranks: taken with its own flags, read by our verb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron_run import MOCK, MODEL, MOE, TRAIN, megatron_moe, train

from megatron_ext.trace import account, ranks, read_traces, rows_of, work_of
from megatron_ext.trace.comms import communication

PROFILE = ["--profile", "--use-pytorch-profiler", "--profile-step-start", "3", "--profile-step-end", "5"]
# Two layers, two micro-batches of each rank, dispatch and combine: rows, their weights and the way back, each with its
# backward.
ALL_TO_ALLS_A_STEP = 2 * 2 * 3 * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    flags = [*MODEL, *MOE, *TRAIN, *MOCK, *PROFILE, "--tensorboard-dir", str(run / "tensorboard"), "--train-iters", "5"]
    done = train(flags)
    assert done.returncode == 0, done.stdout[-3000:]
    return run


def test_every_rank_writes_the_steps_asked_for_and_all_their_time_is_found(folder: Path):
    traces = read_traces([folder])
    assert [(trace.rank, trace.world_size, list(trace.steps)) for trace in traces] == [(0, 2, [3, 4]), (1, 2, [3, 4])]
    for trace in traces:
        work = work_of(trace)
        rows = {row.kind: row for row in rows_of(work)}
        assert sum(row.span_ns for row in rows.values()) == work.span
        assert {"GEMM", "optimizer", "loss", "permute", "all-to-all", account.HOST_IDLE} <= set(rows)
        moved = {part.kind: part for part in communication(trace, work).collectives}
        assert moved["all-to-all"].count == 2 * ALL_TO_ALLS_A_STEP
        assert 0 < moved["all-to-all"].exposed_ns <= moved["all-to-all"].total_ns
        one = rows_of(work_of(trace, 4))
        assert sum(row.span_ns for row in one) == trace.steps[4][1] - trace.steps[4][0]


def test_the_ranks_collectives_match(folder: Path):
    traces = read_traces([folder])
    found = ranks.compare(traces, [work_of(trace) for trace in traces])
    matched = {arrival.kind: arrival for arrival in found.arrivals}
    assert matched["all-to-all"].count == 2 * ALL_TO_ALLS_A_STEP
    assert sum(matched["all-to-all"].last) == 2 * ALL_TO_ALLS_A_STEP
    assert sum(found.waited_ns) == sum(found.caused_ns) > 0
    # One machine: the clocks differ by what two processes' calibrations do, not by seconds.
    assert abs(found.offsets_ns[1]) < 50_000_000


def test_the_verb_prints_it(folder: Path, tmp_path: Path):
    out = tmp_path / "trace.json"
    done = megatron_moe("trace", str(folder), "--json", str(out))
    assert done.returncode == 0, done.stderr
    for part in ("no GPU in the trace", "where the span went", "who keeps whom waiting", "look at first: "):
        assert part in done.stdout
    written = json.loads(out.read_text())
    assert [rank["rank"] for rank in written["ranks"]] == [0, 1]
    assert written["notes"] == []
