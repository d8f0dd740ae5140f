"""Upstream's own `alltoall` dispatcher behind the benchmark's interface, where Megatron can be imported."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_ext.dispatch.layout import Layout


def upstream_alltoall(layout: Layout, group: Any) -> Callable[..., tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]]:
    """Return upstream's dispatcher; permute fusion is on where Transformer Engine is installed.

    Args:
        layout: The group.
        group: Its process group; expert tensor parallel size 1.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    single = _group_of_one()
    groups = SimpleNamespace(ep=group, expt_tp=single, tp_ep=group)
    first = layout.first_expert
    made: dict[tuple[int, int], Any] = {}

    def dispatcher(hidden: int, top_k: int) -> Any:
        if (hidden, top_k) not in made:
            config = TransformerConfig(
                num_layers=1,
                hidden_size=hidden,
                num_attention_heads=1,
                num_moe_experts=layout.num_experts,
                moe_router_topk=top_k,
                expert_model_parallel_size=layout.world,
                moe_token_dispatcher_type="alltoall",
                moe_permute_fusion=_has_te(),
            )
            experts = list(range(first, first + layout.num_local_experts))
            made[hidden, top_k] = MoEAlltoAllTokenDispatcher(layout.num_local_experts, experts, config, groups)
        return made[hidden, top_k]

    def send(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        upstream = dispatcher(x.shape[1], ids.shape[1])
        chosen = torch.zeros(len(x), layout.num_experts, dtype=torch.bool, device=x.device).scatter_(1, ids, True)
        probs = weights.new_zeros(len(x), layout.num_experts).scatter(1, ids, weights)
        rows, flat = upstream.dispatch_preprocess(x.unsqueeze(1), chosen, probs)
        rows, flat = upstream.token_dispatch(rows, flat)
        rows, _, flat = upstream.dispatch_postprocess(rows, flat)

        def home(done: Tensor) -> Tensor:
            back = upstream.token_combine(upstream.combine_preprocess(done))
            return upstream.combine_postprocess(back).squeeze(1)

        return rows, flat, home

    return send


def _group_of_one() -> Any:
    import torch.distributed as dist

    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _has_te() -> bool:
    import importlib.util

    return importlib.util.find_spec("transformer_engine") is not None
