"""The router's logits: their size, how sure the router is, and what the load-balancing loss would read.

The router's module returns no logits, so the linear layer is applied again, on sampled steps only and to the same
input: Megatron's own `gating`, which records nothing. `routing` is never called again; it would count twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_ext.observe import tally
from megatron_ext.observe.layers import MoELayerRef
from megatron_ext.observe.probes.base import Probe, padding_of
from megatron_ext.observe.probes.weights import router_is_graphed
from megatron_ext.observe.topology import Topology


class LogitProbe(Probe):
    """Sums over tokens of logsumexp^2 and entropy; sums of normalized scores; disagreement with the aux loss's map."""

    name = "router logits"
    measures = ("z_rms", "router_entropy", "balance_loss", "aux_map_disagreement")

    @classmethod
    def refusal(cls, config: Any, place: Topology) -> str:
        """Return why not: a graph hides the router, or its logits are replaced by random ones."""
        return router_is_graphed(config) or logits_are_replaced(config)

    def install(self, layer: MoELayerRef) -> None:
        """Hook the router."""
        self.hook(layer, layer.router, "router", self._observe)

    def _observe(
        self, layer: MoELayerRef, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

        padding = padding_of(args, kwargs)
        valid = None if padding is None else ~padding
        logits = native_logits(layer.router, args[0])
        if self.run.native is not None:
            self.run.native[layer.row] = logits
        floats, config = self.run.store.floats, layer.config
        floats["logits"][layer.row] += tally.logit_sums(logits, valid)
        if config.moe_router_score_function not in ("softmax", "sigmoid", "sqrtsoftplus"):
            return
        # As the router itself calls it, fused or not: a tie is then broken as there.
        aux_map, scores = compute_routing_scores_for_aux_loss(
            logits,
            int(config.moe_router_topk),
            config.moe_router_score_function,
            fused=bool(config.moe_router_fusion),
            padding_mask=padding,
        )
        sums = tally.aux_sums(output[1], aux_map.bool(), scores, valid)
        fields = len(tally.AUX_FIELDS)
        floats["aux"][layer.row] += sums[:fields]
        floats["probabilities"][layer.row] += sums[fields:]


def native_logits(router: Any, hidden: Tensor) -> Tensor:
    """Return [T, E]: the logits of [s, b, h] input in the router's own precision, before any jitter."""
    return router.gating(hidden).reshape(-1, int(router.config.num_moe_experts))


def logits_are_replaced(config: Any) -> str:
    """Return which flag puts random numbers in place of the logits, "" where none does."""
    if getattr(config, "moe_router_force_load_balancing", False):
        return "--moe-router-force-load-balancing routes by random numbers, not by the logits"
    if getattr(config, "moe_router_force_biased", None) is not None:
        return "--moe-router-force-biased routes by random numbers, not by the logits"
    return ""
