"""A checkpoint keeps every weight, moment and count to the bit when it is loaded at another expert parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fork import run
from saved import FULLY, load, save, whole_tensors
from small import config, groups, training

pytestmark = pytest.mark.ranks

EXPERT_BIAS: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-2,
}
DATA_PARALLEL: dict[str, Any] = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}


def _train_and_save(expert_parallel: int, bucket_size: int | None, targets: list[tuple[Path, dict[str, Any]]]) -> None:
    groups(expert_parallel)
    trained = training(config(expert_parallel, **EXPERT_BIAS), bucket_size=bucket_size)
    for seed in range(3):
        trained.step(seed)
    for folder, metadata in targets:
        save(trained, folder, metadata)


def _carry_over(bucket_size: int | None, metadata: dict[str, Any], moves: list[tuple[int, Path, Path]]) -> None:
    """Load at each expert parallelism from the first folder; save into the second, fully reshardable."""
    for expert_parallel, source, target in moves:
        groups(expert_parallel)
        trained = training(config(expert_parallel, **EXPERT_BIAS), bucket_size=bucket_size)
        load(trained, source, metadata)
        save(trained, target, FULLY)


def _read(folders: list[Path]) -> list[dict[str, Any]]:
    """Return every whole tensor of some checkpoints, whoever saved which part; as arrays, which cross processes."""
    groups(1)
    return [whole_tensors(folder) for folder in folders]


def _assert_equal(folders: list[Path]) -> dict[str, Any]:
    """Compare all with the first, to the bit; return the first."""
    ((first, *others),) = run(1, _read, folders)
    for folder, other in zip(folders[1:], others, strict=True):
        assert first.keys() == other.keys(), folder.name
        for key, value in first.items():
            assert value.shape == other[key].shape, f"{folder.name}: {key}"
            assert (value == other[key]).all(), f"{folder.name}: {key}: {(value != other[key]).sum()} differ"
    return first


def test_expert_parallel_4_to_2_to_1_and_back(tmp_path: Path) -> None:
    """Many buckets, so that paddings stand between parameters; bf16 weights, fp32 main weights, an expert bias."""
    ep4, ep2, ep1, again = folders = [tmp_path / name for name in ("ep4", "ep2", "ep1", "again")]
    run(8, _train_and_save, 4, 1500, [(ep4, FULLY)])
    run(8, _carry_over, 1500, FULLY, [(2, ep4, ep2), (1, ep2, ep1), (4, ep1, again)])
    content = _assert_equal(folders)
    assert any(key.endswith("expert_bias") and value.any() for key, value in content.items())
    assert len([key for key in content if ".exp_avg_sq." in key]) > 10


def test_fewer_ranks_in_the_default_format(tmp_path: Path) -> None:
    """From 8 ranks to 4 at one expert parallelism. The default format holds paddings, so the other one compares."""
    saved, reference, four = (tmp_path / name for name in ("saved", "reference", "four"))
    run(8, _train_and_save, 4, None, [(saved, DATA_PARALLEL), (reference, FULLY)])
    run(4, _carry_over, None, DATA_PARALLEL, [(4, saved, four)])
    _assert_equal([reference, four])
