"""Autograd over `engine.py`: the backward of dispatch is combine, the backward of combine is dispatch
along the kept handle.

Four differentiable steps, in the order of a layer:

    dispatch      tokens [T, H], weights [T, K]  ->  rows [M, H], weights [M, K]          (communication)
    to_experts    rows, weights                  ->  expert rows [R, H], weights [R]      (local)
    from_experts  expert rows [R, H]             ->  partial sums [M, H]                  (local)
    combine       partial sums [M, H]            ->  tokens [T, H]                        (communication)

The experts multiply by the weight, so both sums are plain. Nothing that travels is saved for backward:
only slot tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.dispatch import routing
from megatron_ext.dispatch.engine import Engine, Handle
from megatron_ext.dispatch.rows import spread_rows, sum_rows


class _Box:
    """Carries a handle out of a forward that may only return tensors."""

    handle: Handle


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


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, slots: Tensor, total: int, gaps: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.slots = slots
        # Gap rows belong to no token: zeros, so that the experts make zeros of them.
        make = rows.new_zeros if gaps else rows.new_empty
        out = make(total, rows.shape[1])
        spread_rows(rows, slots, out)
        # One more place catches the choices of other ranks.
        places = torch.where(slots >= 0, slots, total).long().reshape(-1)
        flat = weights.new_zeros(total + 1).scatter_(0, places, weights.reshape(-1))
        return out, flat[:total]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_flat: Tensor) -> tuple[Tensor | None, ...]:
        slots = ctx.slots
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_out = grad_out.contiguous()
            grad_rows = grad_out.new_empty(len(slots), grad_out.shape[1])
            sum_rows(slots, grad_out, None, grad_rows)
        if ctx.needs_input_grad[1]:
            # A zero behind the end answers for the choices of other ranks.
            padded = torch.nn.functional.pad(grad_flat, (0, 1))
            grad_weights = padded[torch.where(slots >= 0, slots, len(grad_flat)).long()]
        return grad_rows, grad_weights, None, None, None


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


def dispatch(engine: Engine, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Handle]:
    """Bring tokens to the ranks of their experts, differentiably. See `Engine.dispatch`."""
    box = _Box()
    rows, row_weights = _Dispatch.apply(x.contiguous(), weights, ids, engine, box)
    return rows, row_weights, box.handle


def combine(engine: Engine, rows: Tensor, handle: Handle) -> Tensor:
    """Bring partial sums home, differentiably. See `Engine.combine`."""
    return _Combine.apply(rows, engine, handle)


def to_experts(
    rows: Tensor, weights: Tensor, handle: Handle, *, align: int = 0
) -> tuple[Tensor, Tensor, routing.ExpertOrder, Tensor]:
    """Lay received rows out for the experts: by expert, then by received row.

    Args:
        rows: [M, H] from `dispatch`.
        weights: [M, K] from `dispatch`.
        handle: The dispatch's handle.
        align: Pad every expert's rows to a multiple of this with zero rows of weight zero (0: none).

    Returns:
        Expert rows [R, H], their weights [R], the order, and the rows of each local expert [L] int64 on
        the CPU, padding included.
    """
    layout = handle.layout
    # Local numbers: this rank's experts from 0, others' below or beyond, which `order_rows` leaves out.
    ids = handle.ids - layout.rank * layout.num_local_experts
    counts = torch.from_numpy(handle.counts.wait().tokens_per_local_expert())
    return order_rows(rows, weights, ids, counts, align=align)


def order_rows(
    rows: Tensor, weights: Tensor, local_ids: Tensor, counts: Tensor, *, align: int = 0
) -> tuple[Tensor, Tensor, routing.ExpertOrder, Tensor]:
    """Lay rows out for the experts. See `to_experts`.

    Args:
        rows: [M, H].
        weights: [M, K].
        local_ids: [M, K] int64; numbers outside of 0..L-1 are other ranks' experts.
        counts: [L] int64 on the CPU, rows of each local expert.
        align: As in `to_experts`.
    """
    if align > 1:
        counts = (counts + align - 1) // align * align
    slots = routing.expert_slots(local_ids, len(counts), align=align)
    order = routing.ExpertOrder(slots, int(counts.sum()))
    out, flat = _ToExperts.apply(rows, weights, order.slots, order.rows, align > 1)
    return out, flat, order, counts


def from_experts(expert_rows: Tensor, order: routing.ExpertOrder, *, gaps: bool = False) -> Tensor:
    """Sum the experts' outputs of each received row: [R, H] to [M, H].

    Args:
        expert_rows: [R, H], in the order of `to_experts`, already multiplied by the weights.
        order: From `to_experts`.
        gaps: Whether the order has padding rows (their gradient is zero).
    """
    return _FromExperts.apply(expert_rows, order.slots, gaps)
