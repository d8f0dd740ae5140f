"""Does rounding choose the experts? The same input, the current router, recomputed in fp32 (and in bf16).

Both choices go through Megatron's own top-k with the router's settings: score function, groups, expert bias or quantile
offset, fusion. Maps are compared, so the order in which a top-k happens to return its indices doesn't matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.observe import tally
from megatron_ext.observe.layers import MoELayerRef
from megatron_ext.observe.probes.base import Probe, padding_of
from megatron_ext.observe.probes.logits import logits_are_replaced, native_logits
from megatron_ext.observe.probes.weights import router_is_graphed
from megatron_ext.observe.topology import Topology


class FlipProbe(Probe):
    """Counts the tokens whose set, or order, of experts changes with the router's precision."""

    name = "flip rate"
    measures = ("flip_rate", "flip_rate_order", "flip_rate_bf16")

    @classmethod
    def refusal(cls, config: Any, place: Topology) -> str:
        """Return why not: no logits to see, or a choice that isn't made token by token."""
        if config.moe_router_load_balancing_type == "sinkhorn":
            return "--moe-router-load-balancing-type sinkhorn chooses for the whole batch at once"
        return router_is_graphed(config) or logits_are_replaced(config)

    def install(self, layer: MoELayerRef) -> None:
        """Hook the router; a layer that routes by token id has no logits to round."""
        if not getattr(layer.router, "is_hash_layer", False):
            self.run.native = {}
            self.hook(layer, layer.router, "router", self._observe)

    def _observe(
        self, layer: MoELayerRef, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        router, hidden = layer.router, args[0]
        padding = padding_of(args, kwargs)
        # The logit probe, hooked before this one, has just computed them.
        native = (self.run.native or {}).pop(layer.row, None)
        native = native_logits(router, hidden) if native is None else native
        native_map = chosen_map(router, native)
        is_fp32 = native.dtype != torch.bfloat16 and native.dtype != torch.float16
        # An fp32 router is its own exact one: the same product of the same numbers.
        exact = native if native.dtype == torch.float32 else _logits_in(router, hidden, torch.float32)
        exact_map = native_map if exact is native else chosen_map(router, exact)
        self.run.store.floats["flips"][layer.row] += tally.flip_sums(
            chosen=output[1],
            native=native_map,
            exact=exact_map,
            coarse=chosen_map(router, _logits_in(router, hidden, torch.bfloat16)) if is_fp32 else None,
            order=None
            if exact is native
            else tally.order_changed(native, exact, native_map, exact_map, int(router.topk)),
            valid=None if padding is None else ~padding,
        )


def chosen_map(router: Any, logits: Tensor) -> Tensor:
    """Return bool [T, E]: what the router's own top-k picks from [T, E] logits; nothing is recorded or dropped."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    config = router.config
    offset = getattr(router, "qb_beta", None)
    if offset is not None:
        return _map_of((logits.float() - offset).topk(int(router.topk), dim=1).indices, logits)
    fused = bool(config.moe_router_fusion)
    _, chosen = topk_routing_with_score_function(
        logits,
        router.topk,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=router.score_function,
        expert_bias=router.expert_bias,
        fused=fused,
        # Without the fusion the indices alone are asked for: Megatron's way to a map takes five passes over [T, E].
        dense_output=not fused,
    )
    return chosen.bool() if fused else _map_of(chosen, logits)


def _map_of(indices: Tensor, logits: Tensor) -> Tensor:
    """Return bool [T, E] from [T, k] expert numbers."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, indices, True)


def _logits_in(router: Any, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [T, E]: the logits as a router of `dtype` computes them from the same input and current weights."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    logits = router_gating_linear(hidden, router.weight, router.bias, dtype)
    return logits.reshape(-1, int(router.config.num_moe_experts))


def router_dtype_is_fp32(config: Any) -> bool:
    """Return whether the router computes its logits in fp32 or better."""
    return config.moe_router_dtype in ("fp32", "fp64") or not (config.bf16 or config.fp16)
