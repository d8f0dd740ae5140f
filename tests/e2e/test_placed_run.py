"""A run goes on from its placed checkpoint as it would have without: same losses, every expert under its new number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_run import MOCK, MODEL, MOE, TRAIN, losses, megatron_moe, train

from megatron_ext.tracking.rundir import read_run
from megatron_ext.upcycle.source import TRACKER, open_source

STEPS, SAVED_AT = 6, 4
FLAGS = [*MODEL, *MOE, *TRAIN, *MOCK, "--train-iters", str(STEPS), "--save-interval", str(SAVED_AT),
         "--dist-ckpt-optim-fully-reshardable", "--moe-router-score-function", "sigmoid",
         "--moe-router-enable-expert-bias", "--moe-router-dtype", "fp32", "--moe-ext-no-trackio",
         "--moe-ext-observe-interval", "1"]  # fmt: skip


def test_a_run_goes_on_from_its_placed_checkpoint(tmp_path: Path) -> None:
    saved, placed, new = (tmp_path / name for name in ("saved", "placed", "new"))
    first = train([*FLAGS, "--moe-ext-run-dir", str(tmp_path / "run"), "--save", str(saved)])
    assert first.returncode == 0, first.stdout[-3000:]
    # As if it had been stopped there: the two steps behind it are what the placed run is compared with.
    (saved / TRACKER).write_text(str(SAVED_AT))
    said = megatron_moe("place", str(saved), str(placed), "--run", str(tmp_path / "run"), "--ranks", "4")
    assert said.returncode == 0, said.stderr
    assert "4 ranks, placed by 4 samples, steps 1 to 4" in said.stdout
    going_on = train([*FLAGS, "--moe-ext-run-dir", str(tmp_path / "on"), "--load", str(placed), "--save", str(new)])
    assert going_on.returncode == 0, going_on.stdout[-3000:]
    before, after = losses(first.stdout), losses(going_on.stdout)
    assert sorted(after) == [SAVED_AT + 1, STEPS]
    # A start's second line prints the mean of its first two steps.
    assert float(after[SAVED_AT + 1]) == pytest.approx(float(before[SAVED_AT + 1]), rel=1e-5)
    note = json.loads(next(placed.glob("iter_*/placement.json")).read_text())
    orders = np.array([note["layers"][layer]["order"] for layer in ("0", "1")])
    assert (orders != np.arange(8)).any()
    frames = {frame.step: frame.counts for frame in read_run(tmp_path / "run").routing}
    for frame in read_run(tmp_path / "on").routing:
        moved = np.take_along_axis(frames[frame.step], orders, -1)
        # Sums in another order may turn a tie; the second step's weights come from the first's gradients and moments.
        assert np.abs(frame.counts - moved).sum() <= 0.01 * moved.sum()
        assert np.abs(frame.counts - frames[frame.step]).sum() > 0.05 * moved.sum()
    # All states, moments and fp32 weights included, two steps behind the placing.
    (saved / TRACKER).write_text(str(STEPS))
    old, now = open_source(saved), open_source(new)
    assert set(old.tensors) == set(now.tensors)
    for name in old.tensors:
        mine, theirs = old.read(name), now.read(name)
        if ".mlp.experts." in name or ".mlp.router." in name:
            mine = torch.stack([layer[order] for layer, order in zip(mine, torch.from_numpy(orders), strict=True)])
        assert np.allclose(mine.float(), theirs.float(), rtol=1e-3, atol=1e-4), name
