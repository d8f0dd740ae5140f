"""Proof of ncclep-te-signature: Transformer Engine's NCCL EP is started with the arguments that it has.

NCCL EP needs two GPUs, so the start itself is recorded. Its parameters are those of the Transformer Engine that is
installed; here stand those of 2.18.0 and 2.20.2 (transformer_engine/pytorch/ep.py of either wheel), which refuse a call
as the function would.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from routers import config

pytestmark = pytest.mark.usefixtures("world")

OF_2_18 = "(ep_group, num_experts, max_tokens_per_rank, recv_capacity_per_rank, hidden_dim, max_num_sms=0, \
zero_copy=False, max_token_dtype=None)"
OF_2_20 = "(ep_group, num_experts, max_tokens_per_rank, hidden_dim, num_topk, recv_capacity_per_rank=None, \
max_num_sms=0, zero_copy=False, drop_on_overflow=False, max_token_dtype=None)"


def _started(monkeypatch: pytest.MonkeyPatch, parameters: inspect.Signature) -> dict[str, Any]:
    """Let a manager of 8 experts, top-2, start NCCL EP at its first dispatch; return the arguments by name."""
    seen: dict[str, Any] = {}

    def ep_bootstrap(*args: Any, **options: Any) -> None:
        seen.update(parameters.bind(*args, **options).arguments)

    ep_bootstrap.__signature__ = parameters  # type: ignore[attr-defined]
    te_ep = SimpleNamespace(_BOOTSTRAPPED=False, ep_bootstrap=ep_bootstrap)
    monkeypatch.setattr(fused_a2a, "HAVE_TE_EP", True)
    monkeypatch.setattr(fused_a2a, "te_ep", te_ep, raising=False)
    monkeypatch.setattr(token_dispatcher, "nccl_ep_dispatch", lambda *_: None)
    options = config(
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="ncclep",
        moe_expert_rank_capacity_factor=1.5,
        moe_grouped_gemm=True,
        use_transformer_engine_op_fuser=True,
    )
    manager = token_dispatcher._NCCLEPManager(None, 4, router_topk=2, num_experts=8, config=options)
    manager.setup_metadata(torch.ones(100, 8, dtype=torch.bool), torch.rand(100, 8))
    manager._ensure_bootstrap()
    return seen


def _signature(text: str) -> inspect.Signature:
    found: dict[str, Any] = {}
    exec(f"def ep_bootstrap{text}: ...", found)
    return inspect.signature(found["ep_bootstrap"])


def test_the_number_of_experts_a_token_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _started(monkeypatch, _signature(OF_2_20))
    assert (seen["num_experts"], seen["num_topk"]) == (8, 2)


def test_an_older_one_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _started(monkeypatch, _signature(OF_2_18))["num_experts"] == 8


def test_the_installed_one_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    ep = pytest.importorskip("transformer_engine.pytorch.ep")
    assert _started(monkeypatch, inspect.signature(ep.ep_bootstrap))["num_experts"] == 8
