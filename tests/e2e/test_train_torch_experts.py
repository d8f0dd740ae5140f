"""Grouped experts in real training starts on two ranks: asked for, and over a change of mind."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_run import MOCK, MODEL, MOE, TRAIN, losses, train

SAVING = ["--save-interval", "2", "--dist-ckpt-optim-fully-reshardable"]
COMMON = [*MODEL, *MOE, *TRAIN, *MOCK, "--lr-decay-iters", "100", "--override-opt-param-scheduler"]
GROUPED = ["--moe-ext-experts", "torch"]


def _train(*flags: str, steps: int, fails: bool = False) -> str:
    done = train([*COMMON, *flags, "--train-iters", str(steps)])
    assert (done.returncode != 0) == fails, done.stdout[-3000:]
    return done.stdout


@pytest.mark.nightly
def test_grouped_experts_train_save_and_resume_as_megatrons_do(tmp_path: Path) -> None:
    theirs, ours, place = str(tmp_path / "theirs"), str(tmp_path / "ours"), str(tmp_path / "place")
    reference = _train("--save", theirs, *SAVING, steps=5)
    assert "grouped products" not in reference
    first = _train(*GROUPED, "--save", ours, *SAVING, steps=2)
    assert first.count("[moe] experts: torch's grouped products") == 1
    # Each goes on from the other's checkpoint.
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("2")
    second = _train(*GROUPED, "--load", theirs, steps=5)
    assert "grouped products" in second
    taken_back = _train("--load", ours, steps=5)
    # Megatron prints the mean of the first two steps of a start for the second: compare the others.
    for log, steps in ((first, (1,)), (second, (3, 5)), (taken_back, (3, 5))):
        for step in steps:
            assert float(losses(log)[step]) == pytest.approx(float(losses(reference)[step]), rel=1e-5), step
    # Optimizer state that goes by place is for the experts that wrote it; they are found again without a flag.
    _train(*GROUPED, "--save", place, "--save-interval", "2", steps=2)
    assert "grouped products" in _train("--load", place, steps=3)
    refused = _train("--load", place, "--moe-ext-experts", "megatron", steps=3, fails=True)
    assert "would go to the wrong experts" in refused
    assert "Traceback" not in refused.split("would go to the wrong experts")[0][-500:]
