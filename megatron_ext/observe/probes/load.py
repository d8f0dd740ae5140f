"""The load of each GPU, micro-batch by micro-batch: what its experts were really given, after dispatch."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ext.observe.layers import MoELayerRef
from megatron_ext.observe.probes.base import Probe, Run
from megatron_ext.observe.topology import Topology


class LoadProbe(Probe):
    """Keeps, for the first micro-batches of a sampled step, the busiest local expert's load and the rank's."""

    name = "rank loads"
    measures = ("rank_max_vio", "rank_max_vio_worst", "max_vio_micro", "max_vio_micro_worst")

    def __init__(self, run: Run) -> None:
        """Start with no micro-batch seen."""
        super().__init__(run)
        self._seen: dict[int, int] = {}

    @classmethod
    def refusal(cls, config: Any, place: Topology) -> str:
        """Return why nothing fires at all: a graph of the whole step."""
        if getattr(config, "cuda_graph_impl", "none") == "full_iteration":
            return "--cuda-graph-impl full_iteration replays the whole step and no hook fires"
        return ""

    def install(self, layer: MoELayerRef) -> None:
        """Hook the experts."""
        self.hook(layer, layer.experts, "experts", self._observe)

    def at_flush(self, layers: tuple[MoELayerRef, ...]) -> None:
        """Forget which micro-batches were seen."""
        self._seen.clear()

    def _observe(
        self, layer: MoELayerRef, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        slot = self._seen.get(layer.row, 0)
        self._seen[layer.row] = slot + 1
        if slot >= self.run.store.shape.micro_batches:
            return
        # The dispatcher has often moved the counts to the host already; the few bytes go back without a wait.
        counts = args[1].long()
        load = torch.stack([counts.max(), counts.sum()])
        self.run.store.micro[slot, layer.row] = load.to(self.run.place.device, non_blocking=True)
