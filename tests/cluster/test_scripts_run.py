"""Every launch script really run on this machine, without Slurm, with the CPU toy on two ranks. Minutes: nightly."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ext.cli import main
from megatron_ext.trace import read_traces
from megatron_ext.tracking.rundir import read_run

REPO = Path(__file__).resolve().parents[2]
STEPS = 4

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


class Place:
    """A shared root with tokens and one dense run, as a cluster's file system would have."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tokens = root / "tok" / "manifest.json"

    def start(self, words: str, log: str, **more: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a script; its output goes to a file, since a helper of a rank may hold a pipe open."""
        script, *rest = words.split()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MOE_"))}
        environ = {
            **kept, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", "OMP_NUM_THREADS": "1",
            "MOE_DEVICE": "cpu", "MOE_SCALE": "toy", "GPUS_PER_NODE": "2", "SHARED_ROOT": str(self.root),
            "DATA_MANIFEST": str(self.tokens), "TRAIN_ITERS": str(STEPS), "STOP_AT": str(STEPS), **more,
        }  # fmt: skip
        path = self.root / f"{log}.log"
        with path.open("ab") as stream:
            command = ["bash", str(REPO / "examples/moe" / script), *rest]
            return subprocess.Popen(command, env=environ, cwd=REPO, stdout=stream, stderr=stream), path

    def run(self, words: str, log: str, *, status: int = 0, **more: str) -> str:
        """Run a script to its end and return what it printed."""
        process, path = self.start(words, log, **more)
        code = process.wait(timeout=800)
        text = path.read_text(errors="replace")
        assert code == status, text[-4000:]
        return text

    def steps(self, run: str) -> list[int]:
        """Return the steps in a run's directory."""
        return [row.step for row in read_run(self.root / run).rows]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Tokens made by tokenize.sbatch, from text and a tokenizer that the package itself makes."""
    root = tmp_path_factory.mktemp("shared")
    first = ["--builtin-corpus", str(root / "text"), "--output", str(root / "first"), "--train-tokenizer"]
    assert main(["tokenize", *first, "--vocab-size", "512", "--held-out", "0.1", "--json"]) == 0
    place = Place(root)
    sources = " ".join(f"{path.name}={path}" for path in sorted((root / "text").iterdir()) if path.is_dir())
    tokenizer = root / "first" / json.loads((root / "first" / "manifest.json").read_text())["tokenizer"]["path"]
    place.run("tokenize.sbatch", "tokenize", INPUTS=sources or f"all={root / 'text'}", OUTPUT=str(root / "tok"),
              TOKENIZER_DIR=str(tokenizer), HELD_OUT="0.1")  # fmt: skip
    assert place.tokens.is_file()
    return place


@pytest.fixture(scope="module")
def dense(place: Place) -> Path:
    """A dense run that was stopped by a signal and went on: its checkpoints."""
    process, log = place.start("first_run.sbatch dense", "dense", RUN_DIR=str(place.root / "dense"),
                               TRAIN_ITERS="200", STOP_AT="200")  # fmt: skip
    deadline = time.monotonic() + 300
    while not re.search(r"iteration +1/", log.read_text(errors="replace")):
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 75
    said = re.findall(r"go on with: RUN_DIR=(\S+) bash", log.read_text(errors="replace"))
    assert said == [str(place.root / "dense")]
    saved = place.root / "dense" / "checkpoints"
    stopped_at = int((saved / "latest_checkpointed_iteration.txt").read_text())
    assert 1 <= stopped_at < 200
    end = str(stopped_at + 2)
    place.run("first_run.sbatch dense", "dense", RUN_DIR=said[0], TRAIN_ITERS="200", STOP_AT=end)
    assert place.steps("dense")[-1] == int(end)
    return saved


def test_dense_stops_by_a_signal_and_goes_on(place: Place, dense: Path) -> None:
    info = read_run(place.root / "dense").info
    first, second = (start.iteration for start in info.starts)
    assert first == 0 < second


def test_moe(place: Place) -> None:
    place.run("first_run.sbatch moe", "moe", RUN_DIR=str(place.root / "moe"))
    assert place.steps("moe") == list(range(1, STEPS + 1))


def test_upcycle_trains_and_goes_on_from_its_own(place: Place, dense: Path) -> None:
    more = {"DENSE_CHECKPOINT": str(dense), "RUN_DIR": str(place.root / "upcycled"), "TRAIN_ITERS": "200"}
    first = int((dense / "latest_checkpointed_iteration.txt").read_text())
    for _ in range(2):
        last = first + 2
        place.run("upcycle.sbatch", "upcycle", STOP_AT=str(last), **more)
        assert place.steps("upcycled")[-1] == last
        first = last


def test_one_expert_parity(place: Place, dense: Path) -> None:
    text = place.run("one_expert_parity.sbatch", "parity", DENSE_CHECKPOINT=str(dense),
                     RUN_DIR=str(place.root / "parity"), PARITY_STEPS="3")  # fmt: skip
    assert len(re.findall(r"iteration +3/ +3 ", text)) == 2


def test_balancers_and_a_second_start_that_skips_what_ended(place: Place) -> None:
    run = place.root / "balancers"
    place.run("balancers.sbatch", "balancers", RUN_DIR=str(run))
    names = ("forced", "aux", "bias", "quantile", "quantile-ema")
    for name in names:
        assert place.steps(f"balancers/{name}") == list(range(1, STEPS + 1)), name
    assert place.run("balancers.sbatch", "balancers-again", RUN_DIR=str(run)).count("ended before") == 5


def test_profile(place: Place) -> None:
    run = place.root / "profile"
    place.run("profile_step.sbatch moe", "profile", RUN_DIR=str(run), PROFILE_FROM="2", PROFILE_TO="3")
    traces = read_traces([run])
    assert [trace.rank for trace in traces] == [0, 1]
    assert all(list(trace.steps) == [2] and "aten::mm" in trace.names for trace in traces)


def test_two_nodes_scaled_to_one(place: Place) -> None:
    place.run("two_node_ep16.sbatch", "ep", RUN_DIR=str(place.root / "ep"))
    assert place.steps("ep") == list(range(1, STEPS + 1))
    assert read_run(place.root / "ep").info.config["expert_model_parallel_size"] == 2


def test_preflight(place: Place) -> None:
    run = place.root / "fit"
    text = place.run("preflight.sbatch", "preflight", RUN_DIR=str(run), SIZE="64K", NEED_GB="0.1")
    assert "verdict: good" in text
    shutil.rmtree(run)
