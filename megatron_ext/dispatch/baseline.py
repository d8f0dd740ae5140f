"""The dispatcher to beat, in plain torch: one row per (token, expert), as Megatron's `alltoall` sends them.

Three steps out: sort the rows by expert, all-to-all, sort what came by local expert. Three steps home, then a sum. Its
split sizes need one read-back, as upstream's do. Used by the benchmark where Megatron is not at hand, and by tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.dispatch.layout import Layout


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, out: list[int], back: list[int]) -> Tensor:
        ctx.group, ctx.out, ctx.back = group, out, back
        return _exchange(rows, group, out, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad.contiguous(), ctx.group, ctx.back, ctx.out), None, None, None


def _exchange(rows: Tensor, group: Any, out: list[int], back: list[int]) -> Tensor:
    got = rows.new_empty(sum(back), *rows.shape[1:])
    flat = (got.view(torch.uint8), rows.view(torch.uint8)) if not rows.is_cuda else (got, rows)
    dist.all_to_all_single(*flat, back, out, group=group)
    return got


@dataclass(frozen=True)
class RowPerChoice:
    """The way home of a `row_per_choice_dispatch`."""

    tokens: int
    source: Tensor
    order: Tensor
    splits: tuple[list[int], list[int]]
    group: Any


def row_per_choice_dispatch(
    layout: Layout, group: Any, x: Tensor, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, RowPerChoice]:
    """Send one row per choice.

    Args:
        layout: The group.
        group: Its process group.
        x: [T, H].
        ids: [T, K], no empty choices.
        weights: [T, K].

    Returns:
        Expert rows [R, H], their weights [R], the rows of each local expert [L] on the CPU, and the way home.
    """
    flat = ids.reshape(-1)
    by_expert = flat.argsort(stable=True)
    source = by_expert.div(ids.shape[1], rounding_mode="floor")
    sent = torch.zeros(layout.num_experts, dtype=torch.int64, device=x.device)
    sent.scatter_add_(0, flat, torch.ones_like(flat))
    table = sent.new_empty(layout.world * layout.num_experts)
    dist.all_gather_into_tensor(table, sent, group=group)
    counts = table.view(layout.world, layout.world, layout.num_local_experts).cpu()
    out = counts[layout.rank].sum(1).tolist()
    mine = counts[:, layout.rank]
    back = mine.sum(1).tolist()
    rows = _AllToAll.apply(x.index_select(0, source), group, out, back)
    flat_weights = _AllToAll.apply(weights.reshape(-1)[by_expert].unsqueeze(1), group, out, back)
    experts = torch.arange(layout.num_local_experts).repeat(layout.world).repeat_interleave(mine.reshape(-1))
    order = experts.argsort(stable=True).to(x.device)
    way = RowPerChoice(len(x), source, order, (out, back), group)
    return rows.index_select(0, order), flat_weights.squeeze(1)[order], mine.sum(0), way


def row_per_choice_combine(rows: Tensor, way: RowPerChoice) -> Tensor:
    """Bring [R, H] home and add up: [T, H]."""
    out, back = way.splits
    unsorted = torch.empty_like(rows).index_copy(0, way.order, rows)
    home = _AllToAll.apply(unsorted, way.group, back, out)
    return home.new_zeros(way.tokens, home.shape[1]).index_add(0, way.source, home)
