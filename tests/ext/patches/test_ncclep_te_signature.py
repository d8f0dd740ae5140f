"""Proof of ncclep-te-signature: Transformer Engine's NCCL EP is started with the arguments that it has.

The library needs a GPU and its own build, so its signature stands here: without num_topk as in 0.19.2's time, with it
(required) as in Transformer Engine 2.20 (transformer_engine/pytorch/ep.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.moe import fused_a2a, token_dispatcher


def _bootstrap(seen: dict[str, Any], requires_topk: bool) -> Any:
    def without(ep_group: Any, num_experts: int, max_tokens_per_rank: int, recv_capacity_per_rank: int, hidden_dim: int,
                max_num_sms: int = 0, zero_copy: bool = False) -> None:  # fmt: skip
        seen.update(num_experts=num_experts, topk=None)

    def with_topk(ep_group: Any, num_experts: int, max_tokens_per_rank: int, hidden_dim: int, num_topk: int,
                  recv_capacity_per_rank: int | None = None, max_num_sms: int = 0,
                  zero_copy: bool = False) -> None:  # fmt: skip
        seen.update(num_experts=num_experts, topk=num_topk)

    return with_topk if requires_topk else without


@pytest.mark.parametrize("requires_topk", [False, True])
def test_started_with_the_arguments_it_has(monkeypatch: pytest.MonkeyPatch, requires_topk: bool) -> None:
    seen: dict[str, Any] = {}
    te_ep = SimpleNamespace(_BOOTSTRAPPED=False, ep_bootstrap=_bootstrap(seen, requires_topk))
    monkeypatch.setattr(fused_a2a, "HAVE_TE_EP", True)
    monkeypatch.setattr(fused_a2a, "te_ep", te_ep, raising=False)
    manager = object.__new__(token_dispatcher._NCCLEPManager)
    manager._bootstrapped, manager.zero_copy, manager.alignment, manager.group = False, False, 0, None
    manager.num_local_tokens, manager.router_topk, manager.rank_capacity_factor = 100, 6, 1.5
    manager.num_experts, manager.hidden_dim = 8, 16
    manager.config = SimpleNamespace(moe_flex_dispatcher_num_sms=None)
    manager._ensure_bootstrap()
    assert seen == {"num_experts": 8, "topk": 6 if requires_topk else None}
