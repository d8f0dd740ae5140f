"""What the shared expert contributes next to the routed ones, and the size of the latent up-projection's output."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_ext.observe import tally
from megatron_ext.observe.layers import MoELayerRef
from megatron_ext.observe.override import run_after
from megatron_ext.observe.probes.base import Probe, Run
from megatron_ext.observe.topology import Topology


class SharedProbe(Probe):
    """Sums the squares of the shared output (after its gate) and of the routed output (after combine)."""

    name = "shared expert's share"
    measures = ("shared_share",)

    def __init__(self, run: Run) -> None:
        """Start with no overlapped shared output in hand."""
        super().__init__(run)
        self._overlapped: dict[int, Tensor] = {}

    @classmethod
    def refusal(cls, config: Any, place: Topology) -> str:
        """Return why not: a graph hides the shared expert."""
        impl = getattr(config, "cuda_graph_impl", "none")
        if config.moe_shared_expert_intermediate_size is not None and impl not in ("none", None):
            return f"--cuda-graph-impl {impl} may replay the shared expert; use --cuda-graph-impl none"
        return ""

    def install(self, layer: MoELayerRef) -> None:
        """Hook the shared expert and the end of combine; nothing where the model has no shared expert."""
        config = layer.config
        if config.moe_shared_expert_intermediate_size is None:
            return
        shared = layer.module.shared_experts
        if config.moe_shared_expert_overlap:
            run_after(shared, "get_output", 0, lambda out: self._keep(layer, out))
        else:
            self.hook(layer, shared, "shared_experts", lambda at, _a, _k, out: self._add("shared", at, out))
        if config.moe_latent_size:
            self.hook(
                layer,
                layer.module.fc2_latent_proj,
                "fc2_latent_proj",
                lambda at, _a, _k, out: self._add("routed", at, out[0]),
            )
        else:
            dispatcher = layer.module.token_dispatcher
            run_after(dispatcher, "combine_postprocess", 1, lambda out: self._combined(layer, out))

    def _keep(self, layer: MoELayerRef, output: Tensor) -> None:
        if self.counting(layer.module):
            self._overlapped[layer.row] = output

    def _combined(self, layer: MoELayerRef, output: Tensor) -> None:
        """Take the combined output; with overlap the dispatcher has just added the shared output to it."""
        shared = self._overlapped.pop(layer.row, None)
        if not self.counting(layer.module):
            return

        def add() -> None:
            if shared is not None:
                self._add("shared", layer, shared)
            self._add("routed", layer, output if shared is None else output - shared.view_as(output))

        self.guarded(add)

    def _add(self, field: str, layer: MoELayerRef, output: Tensor) -> None:
        self.run.store.floats[field][layer.row] += tally.square_sums(output)


class LatentProbe(Probe):
    """Sums the squares after the latent up-projection."""

    name = "latent output"
    measures = ("latent_out_norm",)

    @classmethod
    def refusal(cls, config: Any, place: Topology) -> str:
        """Return why not: a graph of the whole step."""
        if config.moe_latent_size and getattr(config, "cuda_graph_impl", "none") == "full_iteration":
            return "--cuda-graph-impl full_iteration replays the whole step and no hook fires"
        return ""

    def install(self, layer: MoELayerRef) -> None:
        """Hook the up-projection; nothing where the model has none."""
        if layer.config.moe_latent_size:
            self.hook(layer, layer.module.fc2_latent_proj, "fc2_latent_proj", self._observe)

    def _observe(
        self, layer: MoELayerRef, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self.run.store.floats["latent"][layer.row] += tally.square_sums(output[0])
