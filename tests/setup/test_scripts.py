"""What two scripts print: the quickstart's progress, and tests/gpu/run.sh where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# As Megatron prints them.
LOG = """\
 [2026-11-30 07:15:10] iteration       99/     100 | lm loss: 5.400000E+00 |
 [2026-11-30 07:15:11] iteration      100/     100 | consumed samples: 1600 | lm loss: 5.439000E+00 |
 validation loss at iteration 100 | lm loss value: 5.373518E+00 | lm loss PPL: 2.156200E+02 |
 validation loss at iteration 100 on validation set | lm loss value: 5.470409E+00 | lm loss PPL: 2.375573E+02 |
"""


def test_the_last_held_out_loss_of_the_progress_is_that_of_the_table() -> None:
    """Megatron evaluates once more after training; reports keep that value, the later one of the step."""
    script = ROOT / "examples" / "moe" / "quickstart.sh"
    command = f"eval \"$(sed -n '/^progress() {{/,/^}}/p' '{script}')\"; progress dense"
    done = subprocess.run(["bash", "-euc", command], input=LOG, capture_output=True, text=True, check=True)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["dense", "step", "100", "of", "100", "loss", "5.439"],
        ["dense", "held-out", "loss", "5.374"],
        ["dense", "held-out", "loss", "5.470,", "after", "training"],
    ]


@pytest.mark.parametrize("kind", ["without pip", "cut short", "another's"])
def test_an_environment_that_cannot_install_is_made_anew(tmp_path: Path, kind: str) -> None:
    """What a setup leaves that is stopped at some point; a sound one is kept as it is."""
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    venv = tmp_path / ".venv"
    if kind == "without pip":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    elif kind == "cut short":
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").symlink_to(tmp_path / "gone")
    elif kind == "another's":
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
        (venv / "bin" / "python").chmod(0o755)
    command = f"eval \"$(sed -n '/^sound_venv() {{/,/^}}/p' tools/setup/setup.sh)\"; sound_venv '{sys.executable}'"
    subprocess.run(["bash", "-euc", command], cwd=tmp_path, check=True, timeout=120)
    subprocess.run([venv / "bin" / "python", "-m", "pip", "--version"], check=True, stdout=subprocess.DEVNULL)
    (venv / "mine").touch()
    subprocess.run(["bash", "-euc", command], cwd=tmp_path, check=True, timeout=120)
    assert (venv / "mine").exists()


def test_the_gpu_tests_say_that_there_is_no_gpu() -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / "tests" / "gpu" / "run.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 69
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "torch finds no GPU here" in done.stderr
