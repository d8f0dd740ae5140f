"""How the chosen experts are weighted: from the router's own probabilities, after every scaling and dropping."""

from __future__ import annotations

from typing import Any

from megatron_ext.observe import tally
from megatron_ext.observe.layers import MoELayerRef
from megatron_ext.observe.probes.base import Probe, padding_of
from megatron_ext.observe.topology import Topology


class WeightProbe(Probe):
    """Sums over tokens of entropy, largest weight, ratio and size of the mixing weights, and the active width."""

    name = "mixing weights"
    measures = (
        "weight_entropy",
        "top_weight",
        "max1_over_max2",
        "routed_size_mean",
        "routed_size_std",
        "compute_per_token_mean",
        "compute_per_token_std",
    )

    @classmethod
    def refusal(cls, config: Any, place: Topology) -> str:
        """Return why not: a graph hides the router."""
        return router_is_graphed(config)

    def install(self, layer: MoELayerRef) -> None:
        """Hook the router."""
        self.hook(layer, layer.router, "router", self._observe)

    def _observe(
        self, layer: MoELayerRef, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        probs, routing_map = output
        padding = padding_of(args, kwargs)
        valid = None if padding is None else ~padding
        config, floats = layer.config, self.run.store.floats
        topk = int(config.moe_router_topk)
        floats["weights"][layer.row] += tally.weight_sums(probs, topk, valid)
        if config.moe_expert_capacity_factor is not None:
            # Where dropping left a single expert, that one weighs all there is: it says nothing about the gate.
            several = routing_map.sum(-1) > 1
            several = several if valid is None else several & valid
            floats["gate"][layer.row] += tally.weight_sums(probs, topk, several)
            width = config.moe_ffn_hidden_size or config.ffn_hidden_size
            floats["widths"][layer.row] += tally.width_sums(routing_map, int(width), valid)


def router_is_graphed(config: Any) -> str:
    """Return why the router's hook doesn't fire with this configuration, "" where it does."""
    impl = getattr(config, "cuda_graph_impl", "none")
    if impl in ("none", None):
        return ""
    modules = [getattr(module, "name", str(module)) for module in getattr(config, "cuda_graph_modules", ())]
    if impl == "full_iteration" or not modules or any(name in ("moe", "moe_router") for name in modules):
        return f"--cuda-graph-impl {impl} replays the router and its hook doesn't fire; use --cuda-graph-impl none"
    return ""
