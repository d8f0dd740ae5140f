"""Proof of torch-experts: where a backend's experts are chosen, this distribution's choice is asked."""

from __future__ import annotations

import pytest
import routers
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_ext.experts import switch


@pytest.mark.usefixtures("world")
def test_the_local_backend_builds_the_chosen_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "_chosen", "torch")
    chosen = routers.gpt(moe_ffn_hidden_size=32).decoder.layers[0].mlp.experts
    monkeypatch.setattr(switch, "_chosen", "megatron")
    stock = routers.gpt(moe_ffn_hidden_size=32).decoder.layers[0].mlp.experts
    assert type(chosen).__name__ == "TorchGroupedMLP"
    assert type(stock) is SequentialMLP
    assert set(chosen.state_dict()) == set(stock.state_dict())
