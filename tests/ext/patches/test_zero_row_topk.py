"""Proof of zero-row-topk: DeepEP is told the experts that the routing map names, and none for a padding row.

DeepEP itself needs a GPU; what Megatron hands to it is computed here by the real manager.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.token_dispatcher import _DeepepManager


def _told(routing_map: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    manager = object.__new__(_DeepepManager)
    manager.num_experts, manager.router_topk, manager.capacity_factor = 4, 2, None
    manager.setup_metadata(routing_map, probs)
    assert manager.token_indices is not None
    assert manager.token_probs is not None
    return manager.token_indices, manager.token_probs


def test_padding_row_reaches_no_expert() -> None:
    routing_map = torch.tensor([[False, True, True, False], [False] * 4])
    indices, weights = _told(routing_map, routing_map * torch.tensor([0.0, 0.25, 0.75, 0.0]))
    assert indices.tolist() == [[2, 1], [-1, -1]]
    assert weights.tolist() == [[0.75, 0.25], [0.0, 0.0]]


def test_chosen_expert_with_weight_zero_is_still_told() -> None:
    # A softmax weight can underflow; the expert was chosen and is counted, so it must get the token.
    routing_map = torch.tensor([[True, False, True, False]])
    indices, _ = _told(routing_map, torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
    assert sorted(indices[0].tolist()) == [0, 2]


def test_gradient_reaches_the_chosen_weights_only() -> None:
    routing_map = torch.tensor([[True, True, False, False], [False] * 4])
    probs = (routing_map * 0.5).requires_grad_()
    _, weights = _told(routing_map, probs)
    weights.sum().backward()
    assert probs.grad is not None
    assert probs.grad.tolist() == [[1.0, 1.0, 0.0, 0.0], [0.0] * 4]
