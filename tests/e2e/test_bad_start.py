"""Starts that cannot work: a clear error with a remedy, an exit code, nothing written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_run import MOCK, MODEL, MOE, ROOT, TRAIN, environment


def _start(flags: list[str], *, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    # One rank without torchrun: every one of these stops before the ranks meet.
    words = [sys.executable, "-m", "megatron_ext.cli", "train", "--device", device, "--", *flags]
    return subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment(), cwd=ROOT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_asked_for_without_one() -> None:
    done = _start([*MODEL, *TRAIN, *MOCK], device="cuda")
    assert done.returncode == 1
    assert "a GPU was asked for" in done.stderr
    assert "--device cpu" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--transformer-impl", "transformer_engine"], "the CPU runtime cannot run this"),
        ([*MOE, "--num-experts", "6", "--expert-model-parallel-size", "4"], "cannot be divided evenly"),
        (["--moe-use-upcycling", *MOE, "--load", "nowhere", "--save", "SAVE"], "there is no checkpoint to upcycle"),
        (["--micro-batch-size", "3"], "Megatron refuses this combination of flags"),
    ],
    ids=["te-on-cpu", "experts-not-divisible", "no-dense-checkpoint", "megatron-s-own-check"],
)
def test_refused_before_anything_is_written(flags: list[str], what: str, tmp_path: Path) -> None:
    flags = [str(tmp_path / "save") if word == "SAVE" else word for word in flags]
    done = _start([*MODEL, *TRAIN, *MOCK, "--train-iters", "2", "--moe-ext-run-dir", str(tmp_path / "run"), *flags])
    assert done.returncode == 1, done.stderr[-2000:]
    assert "error: " in done.stderr
    assert what in done.stderr
    assert "\ntry:" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
