"""The launch scripts under a real Slurm: train, stop by a signal, requeue, resume; preflight over two nodes."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megatron_ext.cli import main
from megatron_ext.tracking.rundir import read_run
from tests.cluster.slurm import Slurm, cluster, why_not

REPO = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with cluster() as running:
        yield running


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    words = ["--builtin-corpus", str(root / "text"), "--output", str(root / "tok"), "--train-tokenizer"]
    assert main(["tokenize", *words, "--vocab-size", "512", "--held-out", "0.1", "--json"]) == 0
    return root / "tok" / "manifest.json"


def _submit(slurm: Slurm, script: str, words: list[str], options: list[str], **more: str) -> str:
    environ = {
        **slurm.environ, "MOE_DEVICE": "cpu", "MOE_SCALE": "toy", "GPUS_PER_NODE": "2", "OMP_NUM_THREADS": "1", **more,
    }  # fmt: skip
    submit = ["sbatch", "--parsable", f"--chdir={REPO}", *options, str(REPO / "examples/moe" / script), *words]
    return Slurm(slurm.root, environ).run(*submit).split(";")[0]


def _steps(run: Path) -> list[int]:
    return sorted({json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()})


def _saved(run: Path) -> int:
    return int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


STEPS = 24


@pytest.mark.timeout(1200)
def test_moe_is_requeued_after_a_signal_and_ends_as_one_run(slurm: Slurm, tokens: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    options = [f"--output={log}", "--time=30"]
    more = {"DATA_MANIFEST": str(tokens), "RUN_DIR": str(run), "SHARED_ROOT": str(tmp_path),
            "TRAIN_ITERS": str(STEPS), "STOP_AT": str(STEPS), "TRACKIO_DIR": str(tmp_path / "trackio")}  # fmt: skip
    job = _submit(slurm, "first_run.sbatch", ["moe"], options, **more)
    deadline = time.monotonic() + 400
    while not (log.exists() and re.search(rf"iteration +1/ +{STEPS} ", log.read_text())):
        assert time.monotonic() < deadline, log.read_text()[-3000:] if log.exists() else "no log"
        assert slurm.state(job) in ("PENDING", "CONFIGURING", "RUNNING"), log.read_text()[-3000:]
        time.sleep(0.2)
    # What Slurm sends five minutes before the time limit (--signal=B:USR1@300).
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    slurm.wait_for(job, {"PENDING", "CONFIGURING"}, 300)
    stopped_at = _saved(run)
    assert 1 <= stopped_at < STEPS
    # Slurm holds a requeued job back for two minutes; a few seconds do: the credential of the first start, revoked in
    # whole seconds, must be older than that of the second (seen with 24.11).
    time.sleep(3)
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    state = slurm.wait_for(job, {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}, 400)
    text = log.read_text()
    assert state == "COMPLETED", text[-3000:]
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job)
    assert f"[launch] requeue {job}" in text
    assert _saved(run) == STEPS
    # Every step once: the second start goes on where the first one saved.
    found = read_run(run)
    assert [row.step for row in found.rows] == list(range(1, STEPS + 1))
    assert _steps(run) == list(range(1, STEPS + 1))
    assert [start.iteration for start in found.info.starts] == [0, stopped_at]
    # And the tracker has one run with all of it.
    with closing(sqlite3.connect(tmp_path / "trackio" / "moe-first-run.db")) as tracker:
        rows = tracker.execute("SELECT DISTINCT run_id, run_name, step FROM metrics ORDER BY step").fetchall()
    assert {name for _, name, _ in rows} == {found.info.name}
    assert len({number for number, _, _ in rows}) == 1
    assert [step for _, _, step in rows] == list(range(1, STEPS + 1))


@pytest.mark.timeout(900)
def test_preflight_over_two_nodes_ends_with_a_verdict(slurm: Slurm, tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "run" / "preflight"
    options = ["--nodes=2", f"--output={log}", "--gres=gpu:1"]
    more = {"RUN_DIR": str(tmp_path / "run"), "SHARED_ROOT": str(tmp_path), "SIZE": "64K", "NEED_GB": "0.1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "GPUS_PER_NODE": "1"}  # fmt: skip
    job = _submit(slurm, "preflight.sbatch", [], options, **more)
    state = slurm.wait_for(job, {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}, 600)
    kept = json.loads((out / "preflight.json").read_text())
    assert kept["nodes"] == ["n1", "n2"], log.read_text()[-3000:]
    assert sorted(kept["measurement"]["node_list"]) == ["n1", "n2"]
    # Two nodes without a baseline cannot be judged, and the job says so with its exit status.
    assert kept["verdict"] == "unknown"
    assert state == "FAILED"
    assert "record it" in log.read_text()


def test_dry_run_under_slurm_prints_the_srun_command_and_starts_nothing(slurm: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = _submit(slurm, "two_node_ep16.sbatch", ["--dry-run"], [f"--output={log}", "--gres=gpu:1"],
                  DATA_MANIFEST="/shared/manifest.json", TRAIN_IMAGE="/shared/image.sqsh", SHARED_ROOT=str(tmp_path),
                  GPUS_PER_NODE="8")  # fmt: skip
    assert slurm.wait_for(job, {"COMPLETED", "FAILED"}, 300) == "COMPLETED", log.read_text()
    text = log.read_text()
    for part in ("srun --nodes=2 --ntasks=2", "--container-image=/shared/image.sqsh", "--expert-model-parallel-size 16",
                 "--nnodes=2", "--rdzv-endpoint=n1:29500"):  # fmt: skip
        assert part in text, text
    assert not os.path.exists(tmp_path / "runs")
