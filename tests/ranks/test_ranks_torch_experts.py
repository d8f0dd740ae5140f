"""Grouped experts and Megatron's own over two ranks: the same training, and checkpoints that go both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fork import run
from saved import FULLY, load, save, whole_tensors
from small import Training, config, groups, training

from megatron_ext.experts import switch

pytestmark = pytest.mark.ranks

BY_PLACE: dict[str, Any] = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
# Megatron fuses the sum of gradients only with kernels of others; ours does it anywhere.
FUSED: dict[str, Any] = {"gradient_accumulation_fusion": True}


def _make(experts: str, expert_parallel: int, bucket_size: int | None = None) -> Training:
    groups(expert_parallel)
    switch._chosen = experts
    options = FUSED if experts == "torch" else {}
    trained = training(config(expert_parallel, **options), bucket_size=bucket_size)
    kinds = {type(layer.mlp.experts).__name__ for layer in trained.model.module.module.decoder.layers}
    assert kinds == {"TorchGroupedMLP" if experts == "torch" else "SequentialMLP"}
    return trained


def _train(experts: str, expert_parallel: int, bucket_size: int | None, folder: Path, metadata: dict) -> list[float]:
    trained = _make(experts, expert_parallel, bucket_size)
    losses = [trained.step(seed) for seed in range(4)]
    save(trained, folder, metadata)
    return losses


def _move(experts: str, expert_parallel: int, source: Path, target: Path, metadata: dict) -> list[float]:
    """Load, save under another name, and return the losses of the next two steps."""
    trained = _make(experts, expert_parallel)
    load(trained, source, metadata)
    save(trained, target, FULLY)
    return [trained.step(seed) for seed in (8, 9)]


def _read(folders: list[Path]) -> list[dict[str, np.ndarray]]:
    groups(1)
    return [whole_tensors(folder) for folder in folders]


def _different(folders: list[Path]) -> set[str]:
    """Return the tensors that are not to the bit as in the first checkpoint."""
    ((first, *others),) = run(1, _read, folders)
    assert len([key for key in first if "exp_avg" in key]) > 10
    for other in others:
        assert other.keys() == first.keys()
    return {key for other in others for key, value in first.items() if not np.array_equal(value, other[key])}


@pytest.mark.parametrize(("expert_parallel", "bucket_size"), [(1, None), (2, None), (2, 1500)])
def test_training_is_megatrons(expert_parallel: int, bucket_size: int | None, tmp_path: Path) -> None:
    """Four steps with Adam: the gradients are summed in one place or the other, rounded alike."""
    theirs = run(2, _train, "megatron", expert_parallel, bucket_size, tmp_path / "theirs", FULLY)
    ours = run(2, _train, "torch", expert_parallel, bucket_size, tmp_path / "ours", FULLY)
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(reference, rel=1e-4)
        assert len(set(reference)) == 4


def test_checkpoints_go_both_ways_and_across_expert_parallelism(tmp_path: Path) -> None:
    """Weights, fp32 weights and moments to the bit."""
    start, ours2, theirs1, ours1, theirs2 = folders = [
        tmp_path / name for name in ("theirs at 2", "ours at 2", "theirs at 1", "ours at 1", "theirs at 2 again")
    ]
    run(2, _train, "megatron", 2, None, start, FULLY)
    here = run(2, _move, "torch", 2, start, ours2, FULLY)
    there = run(2, _move, "megatron", 1, ours2, theirs1, FULLY)
    run(2, _move, "torch", 1, theirs1, ours1, FULLY)
    back = run(2, _move, "megatron", 2, ours1, theirs2, FULLY)
    assert _different(folders) == set()
    # A step's gradient sum is rounded in another order, which bf16 weights show in the step after.
    for mine, reference, again in zip(here, there, back, strict=True):
        assert mine == pytest.approx(reference, rel=1e-3)
        assert again == pytest.approx(mine, rel=1e-4)


def test_optimizer_state_by_place_would_go_to_the_wrong_experts(tmp_path: Path) -> None:
    """Why order.py refuses it: Megatron loads it without a word, and the experts' fp32 weights change places."""
    saved, named, moved = tmp_path / "saved", tmp_path / "named", tmp_path / "moved"
    run(2, _train, "megatron", 2, None, saved, BY_PLACE)
    run(2, _train, "megatron", 2, None, named, FULLY)
    run(2, _move, "torch", 2, saved, moved, BY_PLACE)
    changed = _different([named, moved])
    assert changed
    assert all(".experts." in key for key in changed), changed
