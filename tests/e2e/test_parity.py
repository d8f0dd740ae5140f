"""The example of the parity run: one expert, upcycled, beside the dense run, in deterministic mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_run import ROOT

from megatron_ext.cli import main
from megatron_ext.errors import UserError
from megatron_ext.tracking.rundir import read_run
from megatron_ext.upcycle import parity

STEPS = 15
QUIET = "--moe-ext-no-trackio"  # its own process; nothing here reads it


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's run directory, from a dense run of five steps on this project's own pages."""
    folder = tmp_path_factory.mktemp("parity")
    pages = folder / "pages"
    pages.mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        for number, part in enumerate(page.read_text().split("\n## ")):
            (pages / f"{page.stem}-{number}.txt").write_text(part)
    assert main(["tokenize", "--input", f"docs={pages}", "--train-tokenizer", "--vocab-size", "512",
                 "--held-out", "0.2", "--output", str(folder / "data")]) == 0  # fmt: skip
    where = {"DATA_MANIFEST": str(folder / "data/manifest.json"), "SHARED_ROOT": str(folder)}
    example("first_run.sbatch", "dense", QUIET, RUN_DIR=str(folder / "dense"), STOP_AT="5", **where)
    said = example("one_expert_parity.sbatch", QUIET, RUN_DIR=str(folder / "both"), **where,
                   DENSE_CHECKPOINT=str(folder / "dense/checkpoints"))  # fmt: skip
    assert f"{STEPS} steps: largest gap" in said
    return folder / "both"


def example(script: str, *words: str, **more: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MOE_"))}
    environ = {**kept, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", "OMP_NUM_THREADS": "1",
               "MOE_DEVICE": "cpu", "MOE_SCALE": "toy", "GPUS_PER_NODE": "1", **more}
    done = subprocess.run(["bash", str(ROOT / "examples/moe" / script), *words], env=environ, cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_one_expert_trains_like_the_dense_model(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main([str(runs / "dense"), str(runs / "moe"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == STEPS
    assert found["largest_gap"] < 1e-3
    assert found["balance_off"] == 0.0
    # Two layers of hidden size 64.
    assert found["router_weights"] == found["extra_zeros"] == 128
    # They trained: a run that stands still agrees with everything.
    _, losses = read_run(runs / "dense").series("lm loss")
    assert losses[-1] < losses[0] - 0.02


def test_a_run_that_differs_is_told_apart(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "moe"
    other.mkdir()
    for path in (runs / "moe").glob("*.json*"):
        (other / path.name).write_bytes(path.read_bytes())
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] == 7:
            line["metrics"] = {name: value + 0.01 if name in ("lm loss", "load_balancing_loss") else value
                               for name, value in line["metrics"].items()}
            line["metrics"] = {name: value - 64 if name == "num-zeros" else value
                               for name, value in line["metrics"].items()}
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert parity.main([str(runs / "dense"), str(other)]) == 1
    said = capsys.readouterr().out
    assert "at step 7" in said
    assert "away from 1" in said
    assert "router gradients are not zero" in said
    with pytest.raises(UserError, match="not an MoE of one expert"):
        parity.compare(read_run(other), read_run(runs / "dense"), steps=STEPS, limit=1e-3)
    with pytest.raises(UserError, match="too few steps"):
        parity.compare(read_run(runs / "dense"), read_run(other), steps=STEPS + 1, limit=1e-3)
