"""The size of each expert's output, for sequential experts and grouped GEMM alike.

Both return one buffer of rows in expert order, split by tokens_per_expert, already multiplied by the mixing weights
(inside the activation, before the second linear layer; biases are multiplied as well). So each row's mean square is
divided by its weight's square.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.observe import tally
from megatron_ext.observe.layers import MoELayerRef
from megatron_ext.observe.probes.base import Probe
from megatron_ext.observe.topology import Topology


class NormProbe(Probe):
    """Sums each expert's mean square and its rows."""

    name = "expert norms"
    measures = ("expert_norm_max_over_median", "expert_norm_min_over_median", "expert_norm_median")

    @classmethod
    def refusal(cls, config: Any, place: Topology) -> str:
        """Return why not: with expert tensor parallel the experts return partial sums."""
        if place.etp_size > 1:
            return "--expert-tensor-parallel-size > 1: the experts return partial sums of their outputs"
        if getattr(config, "cuda_graph_impl", "none") == "full_iteration":
            return "--cuda-graph-impl full_iteration replays the whole step and no hook fires"
        return ""

    def install(self, layer: MoELayerRef) -> None:
        """Hook the experts."""
        self.hook(layer, layer.experts, "experts", self._observe)

    def _observe(
        self, layer: MoELayerRef, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        _, tokens_per_expert, probs = args[:3]
        # With the weights on the input (top-1 only) the expert is not linear in them: the norm is the weighted input's.
        weights = None if layer.config.moe_apply_probs_on_input else probs
        sums = tally.expert_row_sums(output[0], weights, tokens_per_expert)
        first = self.run.place.ep_rank * sums.shape[1]
        self.run.store.floats["experts"][layer.row, :, first : first + sums.shape[1]] += sums
