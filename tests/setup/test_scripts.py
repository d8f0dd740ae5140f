"""What two scripts print: the quickstart's progress, and tests/gpu/run.sh where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_the_gpu_tests_say_that_there_is_no_gpu() -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / "tests" / "gpu" / "run.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 69
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "torch finds no GPU here" in done.stderr
