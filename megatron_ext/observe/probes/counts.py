"""Tokens per expert, from the routing map of every micro-batch of every step; by data label on sampled steps."""

from __future__ import annotations

from typing import Any

from megatron_ext.observe import tally
from megatron_ext.observe.layers import MoELayerRef
from megatron_ext.observe.probes.base import Probe, padding_of
from megatron_ext.observe.topology import Topology


class CountProbe(Probe):
    """Counts n_e and T. Where the router sits in a CUDA graph it counts dispatched rows instead (padding included)."""

    name = "token counts"
    measures = (
        "tokens_per_expert",
        "max_vio",
        "dead_share",
        "load_cv",
        "load_entropy",
        "drop_share",
        "source_information",
    )
    every_step = True

    @classmethod
    def refusal(cls, config: Any, place: Topology) -> str:
        """Return why nothing fires at all: a graph of the whole step."""
        if getattr(config, "cuda_graph_impl", "none") == "full_iteration":
            return "--cuda-graph-impl full_iteration replays the whole step and no hook fires"
        return ""

    def install(self, layer: MoELayerRef) -> None:
        """Hook the router, or the experts where the router is in a graph."""
        if self.run.graphed:
            self.hook(layer, layer.experts, "experts", self._dispatched)
        else:
            self.hook(layer, layer.router, "router", self._routed)

    def _routed(
        self, layer: MoELayerRef, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        routing_map, padding = output[1], padding_of(args, kwargs)
        store = self.run.store
        field = "step_counts" if self.run.sampling else "window_counts"
        store.ints[field][layer.row] += tally.valid_counts(routing_map, padding)
        if not self.run.sampling:
            return
        store.ints["tokens"][layer.row] += routing_map.shape[0] if padding is None else (~padding).sum()
        labels = self.run.labels
        if labels is not None:
            by_label = tally.source_counts(routing_map, labels, store.shape.sources, padding)
            store.ints["source_counts"][layer.row] += by_label

    def _dispatched(
        self, layer: MoELayerRef, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        counts = args[1].to(self.run.place.device, non_blocking=True)
        first = self.run.place.ep_rank * counts.shape[0]
        field = "step_counts" if self.run.sampling else "window_counts"
        self.run.store.ints[field][layer.row, first : first + counts.shape[0]] += counts
