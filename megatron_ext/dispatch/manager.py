"""What our communication managers of Megatron's flex dispatcher have in common, whatever carries the rows.

The dispatcher calls, in this order: `setup_metadata` (routing map and probabilities), `dispatch`,
`get_permuted_hidden_states_by_experts`, then the experts, `get_restored_hidden_states_by_experts`, `combine`.
Between them state lies on the manager, as upstream's managers keep it; what backward needs is kept by autograd, so a
second micro-batch may start before the first one's backward. Under expert-parallel overlap Megatron replaces
`token_probs` and `dispatched_probs` by detached copies between the steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.dispatch.autograd import choose, from_experts
from megatron_ext.dispatch.errors import DispatchError
from megatron_ext.dispatch.routing import ExpertOrder


class FlexManager:
    """The manager of one MoE layer, but for the transfer.

    Args:
        dispatcher: Megatron's flex dispatcher: `tp_size` and `config`.

    Raises:
        DispatchError: A flag that these dispatchers don't support.
    """

    def __init__(self, dispatcher: Any) -> None:
        config = dispatcher.config
        refuse(config)
        self._dispatcher = dispatcher
        self._top_k = dispatcher.tp_size * config.moe_router_topk
        self._align = align_of(config)
        self.layer_number = -1
        self._ids: Tensor | None = None
        self._order: ExpertOrder | None = None
        self.token_probs: Tensor | None = None
        self.dispatched_probs: Tensor | None = None
        self.tokens_per_expert: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Take the routing.

        Args:
            routing_map: [T, W, L] bool: for every rank of the group, which of its experts get the token.
            probs: [T, W, L], the weights.
        """
        tokens = routing_map.shape[0]
        self._ids, self.token_probs = choose(routing_map.reshape(tokens, -1), probs.reshape(tokens, -1), self._top_k)

    @property
    def _counts_on_device(self) -> bool:
        """Whether the experts read their counts on the device; the layer says so once it has built both."""
        return bool(getattr(self._dispatcher, "counts_on_device", False))

    def get_number_of_tokens_per_expert(self) -> Tensor | None:
        """Rows of each local expert, [L] int64 on the CPU, or on the device for experts that read them there."""
        return self.tokens_per_expert

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """Sum the experts' outputs of each received row: [R, H] to [M, H]."""
        assert self._order is not None, "get_permuted_hidden_states_by_experts comes first"
        return from_experts(hidden_states, self._order, gaps=self._align > 1)


def refuse(config: Any) -> None:
    """Stop on what these dispatchers do not do, by flag.

    Raises:
        DispatchError: with the flag, why, and what to do.
    """
    graphs = [str(getattr(m, "name", m)) for m in getattr(config, "cuda_graph_modules", None) or []]
    refusals = (
        (
            "--moe-pad-expert-input-to-capacity",
            bool(config.moe_pad_expert_input_to_capacity),
            "rows follow the routing, not a capacity",
        ),
        (
            "--cuda-graph-impl full_iteration",
            getattr(config, "cuda_graph_impl", "none") == "full_iteration",
            "row counts are read by the host once a layer",
        ),
        (
            "--cuda-graph-modules moe_preprocess",
            getattr(config, "cuda_graph_impl", "none") != "none" and "moe_preprocess" in graphs,
            "the routing must stay outside the graph: its shape tables are new every step",
        ),
    )
    for flag, asked, why in refusals:
        if asked:
            raise DispatchError(
                "this dispatcher does not support the flag",
                where=f"{flag} with --moe-flex-dispatcher-backend {config.moe_flex_dispatcher_backend}",
                why=why,
                remedy="leave the flag out, or use --moe-token-dispatcher-type alltoall",
                exit_code=64,
            )


def align_of(config: Any) -> int:
    """Rows to which the share of each expert is padded, 0 for none: as upstream pads for FP8 and the op fuser."""
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

    padded = config.moe_router_padding_for_quantization or getattr(config, "use_transformer_engine_op_fuser", False)
    return int(get_align_size_for_quantization(config)) if padded else 0
