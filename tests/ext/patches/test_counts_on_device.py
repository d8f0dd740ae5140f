"""Proof of counts-on-device: experts that read their counts on the device get them without a copy or a wait."""

from __future__ import annotations

from typing import Any

import pytest
import routers
import torch
from megatron.core.transformer.moe import token_dispatcher

from megatron_ext.experts import switch


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the dispatcher brings to the host."""
    seen: list[Any] = []

    def move(tensor: Any, **options: Any) -> Any:
        seen.append(tensor)
        return tensor

    monkeypatch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", move)
    return seen


@pytest.mark.usefixtures("world")
def test_one_rank_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, copies: list[Any]) -> None:
    options: dict[str, Any] = {"moe_ffn_hidden_size": 32, "moe_token_dispatcher_type": "alltoall"}
    monkeypatch.setattr(switch, "_chosen", "megatron")
    stock = routers.gpt(**options)
    expected = routers.forward(stock)
    assert copies  # Megatron's own experts need them
    copies.clear()
    monkeypatch.setattr(switch, "_chosen", "torch")
    model = routers.gpt(**options)
    model.load_state_dict(stock.state_dict())
    found = routers.forward(model)
    assert copies == []
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("world")
def test_a_capacity_still_needs_the_host(monkeypatch: pytest.MonkeyPatch, copies: list[Any]) -> None:
    monkeypatch.setattr(switch, "_chosen", "torch")
    model = routers.gpt(
        moe_ffn_hidden_size=32, moe_token_dispatcher_type="alltoall", moe_expert_capacity_factor=1.0
    )
    routers.forward(model)
    assert copies
