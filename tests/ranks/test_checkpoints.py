"""A checkpoint keeps every weight, moment and count to the bit when it is loaded at another expert parallelism."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from fork import run
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.utils import unwrap_model
from small import Training, config, groups, training

pytestmark = pytest.mark.ranks

EXPERT_BIAS: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-2,
}
FULLY: dict[str, Any] = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
DATA_PARALLEL: dict[str, Any] = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}


def _sharded(trained: Training, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    model = unwrap_model(trained.model).sharded_state_dict(metadata=dict(metadata))
    # The optimizer finds its parameters in a dict that still holds them.
    optimizer = trained.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(metadata))
    return {"model": model, "optimizer": optimizer}


def _save(trained: Training, folder: Path, metadata: dict[str, Any]) -> None:
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    # Megatron starts a manager process a rank for a writer in the background; this one writes in threads.
    filesystem_async._results_queue = queue.Queue()
    state = _sharded(trained, metadata, is_loading=False)
    dist_checkpointing.save(state, str(folder), validate_access_integrity=True)


def _load(trained: Training, folder: Path, metadata: dict[str, Any]) -> None:
    state = dist_checkpointing.load(_sharded(trained, metadata, is_loading=True), str(folder))
    unwrap_model(trained.model).load_state_dict(state["model"])
    trained.optimizer.load_state_dict(state["optimizer"])


def _train_and_save(expert_parallel: int, bucket_size: int | None, targets: list[tuple[Path, dict[str, Any]]]) -> None:
    groups(expert_parallel)
    trained = training(config(expert_parallel, **EXPERT_BIAS), bucket_size=bucket_size)
    for seed in range(3):
        trained.step(seed)
    for folder, metadata in targets:
        _save(trained, folder, metadata)


def _carry_over(bucket_size: int | None, metadata: dict[str, Any], moves: list[tuple[int, Path, Path]]) -> None:
    """Load at each expert parallelism from the first folder; save into the second, fully reshardable."""
    for expert_parallel, source, target in moves:
        groups(expert_parallel)
        trained = training(config(expert_parallel, **EXPERT_BIAS), bucket_size=bucket_size)
        _load(trained, source, metadata)
        _save(trained, target, FULLY)


def _read(folders: list[Path]) -> list[dict[str, Any]]:
    """Return every whole tensor of some checkpoints, whoever saved which part; as arrays, which cross processes."""
    groups(1)
    loaded = [dist_checkpointing.load_plain_tensors(str(folder)) for folder in folders]
    return [{k: v.float().numpy() for k, v in one.items() if isinstance(v, torch.Tensor)} for one in loaded]


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
