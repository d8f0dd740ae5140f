"""Proof of zero-token-rank: the fused unpermute gives rows for all tokens, also where no expert output came back.

The fused kernel needs a GPU. For empty input it returns a copy of the input (Transformer Engine 2.20,
transformer_engine/pytorch/permutation.py, moe_unpermute_mask_map_forward); the stand-in does the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils


def _te_unpermute(permuted: torch.Tensor, row_id_map: torch.Tensor, restore_shape: Any = None, **_: Any) -> Any:
    if not permuted.numel():
        return permuted.clone()
    return permuted.new_zeros(restore_shape).index_add(0, row_id_map, permuted)


@pytest.fixture(autouse=True)
def _te(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    monkeypatch.setattr(moe_utils, "fused_unpermute", _te_unpermute)
    monkeypatch.setattr(moe_utils, "is_te_min_version", lambda version: True)


def test_rank_without_expert_tokens_keeps_its_shape_and_its_graph() -> None:
    # The allgather dispatcher unpermutes before its reduce-scatter: an empty rank would hang all others.
    nothing = torch.zeros(0, 16, requires_grad=True)
    output = moe_utils.unpermute(nothing, torch.zeros(0, dtype=torch.long), torch.Size([5, 16]), fused=True)
    assert output.shape == (5, 16)
    assert not output.any()
    output.sum().backward()
    assert nothing.grad is not None
    assert nothing.grad.shape == (0, 16)


def test_rank_with_tokens_is_left_alone() -> None:
    tokens = torch.arange(6.0).view(3, 2)
    output = moe_utils.unpermute(tokens, torch.tensor([2, 0, 2]), torch.Size([4, 2]), fused=True)
    assert output.tolist() == [[2.0, 3.0], [0.0, 0.0], [4.0, 6.0], [0.0, 0.0]]
