"""Autograd over `engine.py`: the backward of dispatch is combine, the backward of combine is dispatch
along the kept handle.

Five differentiable steps, in the order of a layer:

    choose        probabilities [T, E]           ->  ids [T, K], weights [T, K]           (local)
    dispatch      tokens [T, H], weights [T, K]  ->  rows [M, H], weights [M, K]          (communication)
    to_experts    rows, weights                  ->  expert rows [R, H], weights [R]      (local)
    from_experts  expert rows [R, H]             ->  partial sums [M, H]                  (local)
    combine       partial sums [M, H]            ->  tokens [T, H]                        (communication)

The experts multiply by the weight, so both sums are plain. Nothing that travels is saved for backward:
only slot tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.dispatch import routing
from megatron_ext.dispatch.engine import Engine, Handle
from megatron_ext.dispatch.rows import gather_weights, spread_rows, spread_weights, sum_rows

_SPARE = 16  # one row more for so many: a guess that is too low costs a second copy, spare rows cost memory


class _Box:
    """Carries a handle out of a forward that may only return tensors."""

    handle: Handle


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, routing_map: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        ids, weights = routing.choose(routing_map, probs, top_k)
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(ids)
        ctx.set_materialize_grads(False)  # no zeros for the ids
        ctx.num_experts = probs.shape[1]
        return ids, weights

    @staticmethod
    def backward(ctx: Any, _: None, grad_weights: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad_weights is None:
            return None, None, None
        (ids,) = ctx.saved_tensors
        return routing.choose_grad(ids, grad_weights, ctx.num_experts), None, None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, engine: Engine, box: _Box) -> tuple[Tensor, Tensor]:
        rows, row_weights, handle = engine.dispatch(x, ids, weights)
        ctx.engine, ctx.handle = engine, handle
        box.handle = handle
        return rows, row_weights

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.engine.combine(grad_rows.contiguous(), ctx.handle)
        if ctx.needs_input_grad[1]:
            grad_w = ctx.engine.combine(grad_weights.contiguous(), ctx.handle)
        return grad_x, grad_w, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, engine: Engine, handle: Handle) -> Tensor:
        ctx.engine, ctx.handle = engine, handle
        return engine.combine(rows.contiguous(), handle)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.engine.send_rows(grad.contiguous(), ctx.handle), None, None


def _spread(rows: Tensor, weights: Tensor, slots: Tensor, total: int, gaps: bool) -> tuple[Tensor, Tensor]:
    # Gap rows belong to no token: zeros, so that the experts make zeros of them.
    out = (rows.new_zeros if gaps else rows.new_empty)(total, rows.shape[1])
    flat = (weights.new_zeros if gaps else weights.new_empty)(total)
    spread_rows(rows, slots, out)
    spread_weights(weights, slots, flat)
    return out, flat


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        slots: Tensor,
        total: int,
        gaps: bool,
        ahead: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.slots = slots
        if ahead is not None and total <= len(ahead[0]):
            return ahead[0][:total], ahead[1][:total]
        return _spread(rows, weights, slots, total, gaps)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_flat: Tensor) -> tuple[Tensor | None, ...]:
        slots = ctx.slots
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_out = grad_out.contiguous()
            grad_rows = grad_out.new_empty(len(slots), grad_out.shape[1])
            sum_rows(slots, grad_out, None, grad_rows)
        if ctx.needs_input_grad[1]:
            grad_weights = gather_weights(grad_flat, slots)
        return grad_rows, grad_weights, None, None, None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, expert_rows: Tensor, slots: Tensor, gaps: bool) -> Tensor:
        ctx.slots, ctx.total, ctx.gaps = slots, len(expert_rows), gaps
        expert_rows = expert_rows.contiguous()
        out = expert_rows.new_empty(len(slots), expert_rows.shape[1])
        sum_rows(slots, expert_rows, None, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous()
        make = grad.new_zeros if ctx.gaps else grad.new_empty
        out = make(ctx.total, grad.shape[1])
        spread_rows(grad, ctx.slots, out)
        return out, None, None


def choose(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Turn a routing map into choices, the weights differentiable. See `routing.choose`."""
    ids, weights = _Choose.apply(probs, routing_map, top_k)
    return ids, weights


def dispatch(engine: Engine, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Handle]:
    """Bring tokens to the ranks of their experts, differentiably. See `Engine.dispatch`."""
    box = _Box()
    rows, row_weights = _Dispatch.apply(x.contiguous(), weights, ids, engine, box)
    return rows, row_weights, box.handle


def combine(engine: Engine, rows: Tensor, handle: Handle) -> Tensor:
    """Bring partial sums home, differentiably. See `Engine.combine`."""
    return _Combine.apply(rows, engine, handle)


@dataclass
class Room:
    """How many rows the experts of a layer get, as far as that can be told before the counts are there.

    A layer gets about as many as in the micro-batch before.

    Args:
        rows: Those of the last micro-batch; 0: nothing is known, or no guess is wanted.
    """

    rows: int = 0

    def guess(self, most: int) -> int:
        """A number that the next micro-batch seldom exceeds, at most `most`."""
        return min(self.rows + self.rows // _SPARE, most)


def to_experts(
    rows: Tensor,
    weights: Tensor,
    handle: Handle,
    *,
    align: int = 0,
    counts_on_device: bool = False,
    room: Room | None = None,
) -> tuple[Tensor, Tensor, routing.ExpertOrder, Tensor]:
    """Lay received rows out for the experts: by expert, then by received row.

    Args:
        rows: [M, H] from `dispatch`.
        weights: [M, K] from `dispatch`.
        handle: The dispatch's handle.
        align: Pad every expert's rows to a multiple of this with zero rows of weight zero (0: none).
        counts_on_device: As in `order_rows`.
        room: What is known of this layer's rows, kept from one micro-batch to the next. Where the counts are still on
            their way, the rows are then laid out before, in room for as many as guessed, so that a GPU has no gap
            while the host comes back from the wait; should they not fit, they are laid out anew. The answer is the
            same.

    Returns:
        Expert rows [R, H], their weights [R], the order, and the rows of each local expert [L] int64 on
        the CPU, padding included; or on the rows' device.
    """
    # The table before the wait: the GPU has it to do while the host learns how many rows there are.
    table = routing.expert_slots(handle.ids, handle.layout.num_local_experts, align=align)
    ahead = None
    if room is not None and room.rows and not handle.counts.known:
        ahead = _lay_ahead(rows, weights, table.slots, room.guess(table.slots.numel()), gaps=align > 1)
    counts = torch.from_numpy(handle.counts.wait().tokens_per_local_expert())
    laid_out = _lay_out(rows, weights, table, counts, align, counts_on_device, ahead)
    if room is not None:
        room.rows = laid_out[2].rows
    return laid_out


def _lay_ahead(rows: Tensor, weights: Tensor, slots: Tensor, size: int, *, gaps: bool) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return _spread(rows, weights, torch.where(slots < size, slots, -1), size, gaps)


def order_rows(
    rows: Tensor,
    weights: Tensor,
    local_ids: Tensor,
    counts: Tensor,
    *,
    align: int = 0,
    counts_on_device: bool = False,
) -> tuple[Tensor, Tensor, routing.ExpertOrder, Tensor]:
    """Lay rows out for the experts. See `to_experts`.

    Args:
        rows: [M, H].
        weights: [M, K].
        local_ids: [M, K] int64; numbers outside of 0..L-1 are other ranks' experts.
        counts: [L] int64 on the CPU, rows of each local expert.
        align: As in `to_experts`.
        counts_on_device: Return the rows of each expert as counted on the rows' device: experts that read them there
            wait for no copy.
    """
    table = routing.expert_slots(local_ids, len(counts), align=align)
    return _lay_out(rows, weights, table, counts, align, counts_on_device)


def _lay_out(
    rows: Tensor,
    weights: Tensor,
    table: routing.SlotTable,
    counts: Tensor,
    align: int,
    counts_on_device: bool,
    ahead: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, routing.ExpertOrder, Tensor]:
    if align > 1:
        counts = (counts + align - 1) // align * align
    order = routing.ExpertOrder(table.slots, sum(counts.tolist()))
    out, flat = _ToExperts.apply(rows, weights, order.slots, order.rows, align > 1, ahead)
    return out, flat, order, table.counts if counts_on_device else counts


def from_experts(expert_rows: Tensor, order: routing.ExpertOrder, *, gaps: bool = False) -> Tensor:
    """Sum the experts' outputs of each received row: [R, H] to [M, H].

    Args:
        expert_rows: [R, H], in the order of `to_experts`, already multiplied by the weights.
        order: From `to_experts`.
        gaps: Whether the order has padding rows (their gradient is zero).
    """
    return _FromExperts.apply(expert_rows, order.slots, gaps)
