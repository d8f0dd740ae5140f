"""Proof of one-rank-sort: one rank with all experts sorts nothing a second time, and the result is the same."""

from __future__ import annotations

from typing import Any

import pytest
import routers
import torch
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection


@pytest.mark.usefixtures("world")
def test_one_rank_sorts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("sorted what was in order")

    monkeypatch.setattr(token_dispatcher, "sort_chunks_by_idxs", refuse)
    config = routers.config(moe_token_dispatcher_type="alltoall")
    made = token_dispatcher.MoEAlltoAllTokenDispatcher(8, list(range(8)), config, get_default_pg_collection())
    torch.manual_seed(1)
    hidden = torch.randn(12, 1, 16, device="cuda")
    chosen = torch.rand(12, 8, device="cuda").topk(2).indices
    routing = torch.zeros(12, 8, dtype=torch.bool, device="cuda").scatter(1, chosen, True)
    probs = routing.float() / 2
    tokens, probs = made.dispatch_preprocess(hidden, routing, probs)
    tokens, probs = made.token_dispatch(tokens, probs)
    rows, counts, _ = made.dispatch_postprocess(tokens, probs)
    assert torch.equal(counts.cpu(), routing.sum(0).cpu())
    by_expert = torch.cat([hidden[routing[:, e], 0] for e in range(8)])
    assert torch.equal(rows, by_expert)
    back = made.combine_postprocess(made.token_combine(made.combine_preprocess(rows)))
    torch.testing.assert_close(back, 2 * hidden)
