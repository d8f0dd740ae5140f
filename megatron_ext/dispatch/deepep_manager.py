"""DeepEP as a communication manager of Megatron's flex dispatcher (`deepep_any`): its transfer, our expert order.

Ids come from the routing map, not from a top-k over probabilities, so padding rows reach no expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.dispatch import deepep, probe, publish, report
from megatron_ext.dispatch.autograd import order_rows
from megatron_ext.dispatch.manager import FlexManager
from megatron_ext.dispatch.placement import place


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, transfer: deepep.Transfer, box: list[deepep.Received]
    ) -> tuple[Tensor, Tensor]:
        received = transfer.dispatch(x, ids, weights.float())
        box.append(received)
        ctx.transfer, ctx.handle, ctx.weight_dtype = transfer, received.handle, weights.dtype
        return received.rows, received.weights

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w = ctx.transfer.combine(grad_rows.contiguous(), ctx.handle, grad_weights.contiguous().float())
        return grad_x, None if grad_w is None else grad_w.to(ctx.weight_dtype), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: deepep.Transfer, handle: Any) -> Tensor:
        ctx.transfer, ctx.handle = transfer, handle
        return transfer.combine(rows.contiguous(), handle, None)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transfer.again(grad.contiguous(), ctx.handle), None, None


_transfers: dict[tuple[Any, int], deepep.Transfer] = {}


class DeepEPManager(FlexManager):
    """The manager of one MoE layer.

    Args:
        dispatcher: Megatron's flex dispatcher.
        transfer: For tests: the adapter to use instead of the installed DeepEP's.
    """

    def __init__(self, dispatcher: Any, transfer: deepep.Transfer | None = None) -> None:
        """Check what is installed, or stop with the remedy; one buffer serves all layers."""
        super().__init__(dispatcher)
        num_experts = dispatcher.tp_size * dispatcher.config.num_moe_experts
        self._transfer = transfer or _installed(dispatcher.tp_ep_group, num_experts)
        self._received: deepep.Received | None = None

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Bring [T, H] to the ranks of their experts: [M, H]."""
        box: list[deepep.Received] = []
        rows, self.dispatched_probs = _Dispatch.apply(
            hidden_states.contiguous(), self.token_probs, self._ids, self._transfer, box
        )
        self._received, self._ids = box[0], None
        return rows

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Lay received rows out by expert: rows [R, H] and their weights [R]."""
        assert self._received is not None, "dispatch comes first"
        assert self.dispatched_probs is not None
        counts = torch.tensor(self._received.tokens_per_expert, dtype=torch.int64)
        rows, weights, self._order, self.tokens_per_expert = order_rows(
            hidden_states,
            self.dispatched_probs,
            self._received.ids,
            counts,
            align=self._align,
            counts_on_device=self._counts_on_device,
        )
        return rows, weights

    def combine(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Bring partial sums home: [M, H] to [T, H]."""
        assert self._received is not None, "dispatch comes first"
        handle, self._received, self._order, self.dispatched_probs = self._received.handle, None, None, None
        return _Combine.apply(hidden_states, self._transfer, handle)


def _installed(group: Any, num_experts: int) -> deepep.Transfer:
    key = (group, num_experts)
    if key not in _transfers:
        setup = publish.session()
        placement, node = place(group, setup.options), probe.look()
        facts = deepep.gather_facts(
            num_nodes=len(set(placement.hosts)), instance=node.instance, has_efa=node.num_efa > 0
        )
        deepep.require(facts)
        _transfers[key] = deepep.make_transfer(facts, group, num_experts, setup.max_tokens)
        report.note_line(f"asked for deepep_any, using {facts.distribution} {facts.version} ({facts.api})")
    return _transfers[key]
