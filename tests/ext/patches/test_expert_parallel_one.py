"""Proof of expert-parallel-one: a checkpoint with an expert optimizer loads into one without, and the other way round.

One process has no expert parallelism, so the optimizers here only record what they are given; the real ones, on eight
ranks and to the bit, are in tests/ranks/test_checkpoints.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer


class _Recording:
    """Takes what Megatron's distributed optimizer takes: its parameter groups and its share of the state."""

    def __init__(self, *, is_expert_parallel: bool) -> None:
        self.param_groups = [{"is_expert_parallel": is_expert_parallel}]
        self.loaded: dict[str, Any] = {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = self.param_groups[0]["is_expert_parallel"]
        groups = [g for g in state["optimizer"]["param_groups"] if g["is_expert_parallel"] == mine]
        self.loaded = {"steps": [g["step"] for g in groups], "param_state": state["param_state"],
                       "type": state["param_state_sharding_type"]}  # fmt: skip


def _chain(monkeypatch: pytest.MonkeyPatch, *optimizers: _Recording) -> ChainedOptimizer:
    chain = object.__new__(ChainedOptimizer)
    chain.chained_optimizers = list(optimizers)
    monkeypatch.setattr(chain, "_synchronize_steps", lambda: None)
    return chain


def _common(is_expert_parallel: bool, step: int) -> dict[str, Any]:
    groups = [{"is_expert_parallel": is_expert_parallel, "step": step}]
    return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}


def test_saved_with_expert_optimizer_loads_into_one(monkeypatch: pytest.MonkeyPatch) -> None:
    only = _Recording(is_expert_parallel=False)
    tensors = {0: {"exp_avg": torch.zeros(1)}, 1: {"exp_avg": torch.ones(1)}}
    _chain(monkeypatch, only).load_state_dict({0: _common(False, 7), 1: _common(True, 7), "param_state": tensors})
    assert only.loaded == {"steps": [7], "param_state": tensors, "type": "fully_reshardable"}


def test_saved_by_one_loads_into_dense_and_expert_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, expert = _Recording(is_expert_parallel=False), _Recording(is_expert_parallel=True)
    state = {**_common(False, 7), 0: {"param_state": "dense"}, 1: {"param_state": "expert"}}
    _chain(monkeypatch, dense, expert).load_state_dict(state)
    assert dense.loaded == {"steps": [7], "param_state": "dense", "type": "fully_reshardable"}
    assert expert.loaded == {"steps": [7], "param_state": "expert", "type": "fully_reshardable"}


def test_same_chain_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, expert = _Recording(is_expert_parallel=False), _Recording(is_expert_parallel=True)
    state = {i: {**_common(bool(i), 7), "param_state": i} for i in range(2)}
    _chain(monkeypatch, dense, expert).load_state_dict(state)
    assert (dense.loaded["param_state"], expert.loaded["param_state"]) == (0, 1)
    assert expert.loaded["steps"] == [7]
