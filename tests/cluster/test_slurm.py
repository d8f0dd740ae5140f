"""The launch scripts under a real Slurm: train, stop by a signal, requeue, resume; preflight over two nodes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.cli import main
from tests.cluster.slurm import Slurm, cluster, why_not

REPO = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(bool(why_not()), reason=why_not())]


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
    file = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.timeout(1800)
def test_moe_is_requeued_after_a_signal_and_ends_as_one_run(slurm: Slurm, tokens: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    # One node's cores: the machine is small and the toy has two ranks.
    options = [f"--output={log}", "--time=30"]
    more = {"DATA_MANIFEST": str(tokens), "RUN_DIR": str(run), "SHARED_ROOT": str(tmp_path), "TRAIN_ITERS": "40",
            "STOP_AT": "40", "TRACKIO_DIR": str(tmp_path / "trackio")}  # fmt: skip
    job = _submit(slurm, "first_run.sbatch", ["moe"], options, **more)
    deadline = time.monotonic() + 600
    while not any(step >= 3 for step in _steps(run)):
        assert time.monotonic() < deadline, log.read_text()[-3000:] if log.exists() else "no log"
        assert slurm.state(job) in ("PENDING", "CONFIGURING", "RUNNING"), log.read_text()[-3000:]
        time.sleep(0.2)
    # What Slurm sends five minutes before the time limit (--signal=B:USR1@300).
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    slurm.wait_for(job, {"PENDING", "CONFIGURING"}, 600)
    stopped_at = int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= stopped_at < 40
    # Slurm holds a requeued job back for its begin time; there is nothing to wait for here.
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    state = slurm.wait_for(job, {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}, 900)
    text = log.read_text()
    assert state == "COMPLETED", text[-3000:]
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job)
    assert f"[launch] requeue {job}" in text
    assert int((run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()) == 40
    steps = _steps(run)
    # Every step once: the second start goes on where the first one saved.
    assert list(dict.fromkeys(steps)) == sorted(set(steps))
    assert set(range(1, 41)) <= set(steps)
    record = json.loads((run / "run.json").read_text())
    assert len(record["starts"]) == 2


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
    assert kept["measurement"]["node_list"] == ["n1", "n2"]
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
