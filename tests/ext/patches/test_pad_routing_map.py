"""Proof of pad-routing-map: every expert's count is a multiple of the alignment, also where the tokens don't divide.

The quantized formats that ask for it need a GPU, so the alignment is put in by hand; dispatcher and manager are real.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher as module
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from routers import config

pytestmark = pytest.mark.usefixtures("world")

TOKENS, ALIGN = 100, 128


@pytest.fixture(autouse=True)
def _alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "get_align_size_for_quantization", lambda config: ALIGN)


def _routed() -> tuple[torch.Tensor, torch.Tensor]:
    """90 tokens to experts 0 and 1, ten to experts 2 and 3; each with weights that sum to 1."""
    routing_map = torch.zeros(TOKENS, 8, dtype=torch.bool, device="cuda")
    routing_map[:90, :2] = True
    routing_map[90:, 2:4] = True
    return routing_map, routing_map * 0.5


def test_alltoall_aligns_every_expert_and_gives_every_token_back() -> None:
    options = config()
    options.moe_router_padding_for_quantization = True
    dispatcher = module.MoEAlltoAllTokenDispatcher(8, list(range(8)), options, get_default_pg_collection())
    routing_map, probs = _routed()
    hidden = torch.randn(TOKENS, 1, 16, device="cuda", requires_grad=True)

    dispatched = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(hidden, routing_map, probs))
    expert_input, counts, weights = dispatcher.dispatch_postprocess(*dispatched)
    assert counts.tolist() == [128, 128, 128, 128, 0, 0, 0, 0]
    assert expert_input.shape[0] == 512
    for expert, (rows, shares) in enumerate(zip(expert_input.split(ALIGN), weights.split(ALIGN), strict=True)):
        torch.testing.assert_close(rows[shares > 0], hidden[routing_map[:, expert], 0], rtol=0, atol=0)
    weighted = dispatcher.combine_preprocess(expert_input * weights[:, None])
    output = dispatcher.combine_postprocess(dispatcher.token_combine(weighted))
    torch.testing.assert_close(output, hidden, rtol=0, atol=0)
    output.sum().backward()
    torch.testing.assert_close(hidden.grad, torch.ones_like(hidden), rtol=0, atol=0)


def test_deepep_aligns_what_was_received() -> None:
    manager = object.__new__(module._DeepepManager)
    manager.config, manager.num_local_experts = config(moe_router_dtype="fp32"), 2
    manager.config.moe_router_padding_for_quantization = True
    manager.permute_fusion, manager.router_dtype = False, "fp32"
    manager.dispatched_indices = torch.tensor([[0, -1]] * 90 + [[1, -1]] * 10, device="cuda")
    manager.dispatched_probs = torch.ones(TOKENS, 2, device="cuda")
    manager.tokens_per_expert = torch.tensor([90, 10], device="cuda")
    received = torch.randn(TOKENS, 16, device="cuda")
    expert_input, weights = manager.get_permuted_hidden_states_by_experts(received)
    assert manager.tokens_per_expert.tolist() == [128, 128]
    assert expert_input.shape[0] == 256
    restored = manager.get_restored_hidden_states_by_experts(expert_input * weights[:, None])
    torch.testing.assert_close(restored, received, rtol=0, atol=0)
