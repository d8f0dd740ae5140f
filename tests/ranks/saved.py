"""Sharded checkpoints of a small model and its optimizer: saved, loaded at any layout, read back as whole tensors."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.utils import unwrap_model
from small import Training

FULLY: dict[str, Any] = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def _sharded(trained: Training, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    model = unwrap_model(trained.model).sharded_state_dict(metadata=dict(metadata))
    # The optimizer finds its parameters in a dict that still holds them.
    optimizer = trained.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(metadata))
    return {"model": model, "optimizer": optimizer}


def save(trained: Training, folder: Path, metadata: dict[str, Any]) -> None:
    """Save into a new folder; all ranks call it."""
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    # Megatron starts a manager process a rank for a writer in the background; this one writes in threads.
    filesystem_async._results_queue = queue.Queue()
    state = _sharded(trained, metadata, is_loading=False)
    dist_checkpointing.save(state, str(folder), validate_access_integrity=True)


def load(trained: Training, folder: Path, metadata: dict[str, Any]) -> None:
    """Load weights and the optimizer's state; all ranks call it."""
    state = dist_checkpointing.load(_sharded(trained, metadata, is_loading=True), str(folder))
    unwrap_model(trained.model).load_state_dict(state["model"])
    trained.optimizer.load_state_dict(state["optimizer"])


def whole_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return every whole tensor of a checkpoint, whoever saved which part; as arrays, which cross processes."""
    loaded = dist_checkpointing.load_plain_tensors(str(folder))
    return {key: value.float().cpu().numpy() for key, value in loaded.items() if isinstance(value, torch.Tensor)}
