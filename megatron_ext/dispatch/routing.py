"""From routing to row numbers: who gets which row, and where it lies. Pure arithmetic on tensors, no
process groups.

Shapes: T tokens (rows) here, K expert choices a token, E experts in the group, D destinations of one step
(ranks, nodes or local experts). `ids` is [T, K] int64, ascending in each row, -1 for an empty choice,
always at the end.

A *slot table* [T, K] int32 says in which output row a copy of row t lies: -1 for no copy. One table serves
both ways: the dispatch writes row t to all its slots, the combine sums over them in the order of the
columns. Two choices with the same destination share one copy: only the first has a slot. No function here
reads a value back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.switch import use_kernels


@dataclass(frozen=True)
class SlotTable:
    """Where the copies of each row go.

    Args:
        slots: [T, K] int32, the output row of each copy, -1 for none. Rows are ordered by destination (the
            `last` one at the end), then by t.
        counts: [D] int64, the rows of each destination, in output order.
    """

    slots: Tensor
    counts: Tensor


def choose(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the chosen experts of each token (see `map_to_ids`) and their weights [T, K], 0 for an empty choice.

    Args:
        routing_map: [T, E] bool.
        probs: [T, E] floating, the weight of each expert.
        top_k: K.
    """
    if use_kernels(probs):
        from megatron_ext.dispatch import choice_kernels

        return choice_kernels.choose(routing_map, probs, top_k)
    ids = map_to_ids(routing_map, top_k)
    return ids, probs.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0)


def choose_grad(ids: Tensor, grad_weights: Tensor, num_experts: int) -> Tensor:
    """The gradient of the probabilities that `choose` took: [T, E], 0 where an expert was not chosen.

    Args:
        ids: [T, K] int64 from `choose`.
        grad_weights: [T, K], the gradient of the weights.
        num_experts: E.
    """
    if use_kernels(grad_weights):
        from megatron_ext.dispatch import choice_kernels

        return choice_kernels.choose_grad(ids, grad_weights, num_experts)
    # One more column catches the empty choices.
    places = torch.where(ids < 0, num_experts, ids)
    grad_probs = grad_weights.new_zeros(len(ids), num_experts + 1).scatter_(1, places, grad_weights)
    return grad_probs[:, :num_experts]


def map_to_ids(routing_map: Tensor, top_k: int) -> Tensor:
    """Return the chosen experts of each token, [T, K] int64 ascending with -1 at the end.

    Args:
        routing_map: [T, E] bool. A row may have fewer than `top_k` true entries, or none; never more.
        top_k: K.
    """
    num_experts = routing_map.shape[1]
    # The score falls with the expert's number, so that top-k returns the chosen ones in ascending order; an
    # unchosen expert scores 0. Ties are only between unchosen ones.
    falling = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=routing_map.device)
    scores = torch.where(routing_map, falling, 0)
    best = scores.topk(min(top_k, num_experts), dim=1, sorted=True).values
    ids = torch.where(best > 0, num_experts - best, -1).long()
    return torch.nn.functional.pad(ids, (0, top_k - ids.shape[1]), value=-1)


def sort_choices(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Bring choices in any order into the ascending form, weights along with them.

    Args:
        ids: [T, K], -1 for an empty choice.
        weights: [T, K] floating.
    """
    keys = torch.where(ids < 0, torch.iinfo(torch.int64).max, ids.long())
    order = keys.argsort(dim=1, stable=True)
    return ids.long().gather(1, order), weights.gather(1, order)


@dataclass(frozen=True)
class Destinations:
    """How a step divides the experts: ranges of `size` experts from `first` on, `count` experts in all.

    Args:
        first: The first expert that the step serves.
        count: Experts that it serves, a multiple of `size`.
        size: Experts of one destination.
        last: The destination that is put at the end (a rank's own copies, which do not travel), if any.
    """

    first: int
    count: int
    size: int
    last: int | None = None

    @property
    def number(self) -> int:
        """D."""
        return self.count // self.size

    def of(self, ids: Tensor) -> Tensor:
        """The destination of each choice, [T, K] int64, -1 where the step does not serve it."""
        offset = ids - self.first
        served = (offset >= 0) & (offset < self.count)
        return torch.where(served, offset.div(self.size, rounding_mode="floor"), -1)


def all_ranks(layout: Layout) -> Destinations:
    """Every rank of the group, this one last."""
    return Destinations(0, layout.num_experts, layout.num_local_experts, layout.rank)


def all_nodes(layout: Layout) -> Destinations:
    """Every node, this one last."""
    return Destinations(0, layout.num_experts, layout.num_local_experts * layout.ranks_per_node, layout.node)


def node_ranks(layout: Layout) -> Destinations:
    """The ranks of this node, this one last."""
    count = layout.num_local_experts * layout.ranks_per_node
    return Destinations(layout.node * count, count, layout.num_local_experts, layout.local_rank)


def first_of_run(dest: Tensor) -> Tensor:
    """Blank repeated destinations: [T, K] with -1 where the choice before it has the same destination.

    Examples:
        >>> first_of_run(torch.tensor([[0, 0, 2, 2, -1]])).tolist()
        [[0, -1, 2, -1, -1]]
    """
    repeated = dest[:, 1:] == dest[:, :-1]
    return torch.cat([dest[:, :1], dest[:, 1:].masked_fill(repeated, -1)], dim=1)


def assign_slots(ids: Tensor, to: Destinations) -> SlotTable:
    """Number the copies of every row, by destination and then by row.

    Args:
        ids: [T, K] int64.
        to: Where they may go.
    """
    tokens, top_k = ids.shape
    if tokens == 0:
        return SlotTable(ids.int(), torch.zeros(to.number, dtype=torch.int64, device=ids.device))
    # One mark a (destination, row), destination-major: a running sum over the marks numbers the rows.
    marks = torch.zeros(to.number * tokens + 1, dtype=torch.int32, device=ids.device)
    if use_kernels(ids):
        from megatron_ext.dispatch import routing_kernels

        routing_kernels.mark(ids, to, marks)
        running = marks.cumsum(0, dtype=torch.int32)
        return SlotTable(*routing_kernels.look_up(ids, to, running))
    flat = _flat(ids, to)
    marks.scatter_(0, flat.reshape(-1), 1)
    marks[-1] = 0  # the place of empty choices
    running = marks.cumsum(0, dtype=torch.int32)
    slots = torch.where(flat < len(marks) - 1, running[flat] - 1, -1).int()
    ends = running[tokens - 1 : -1 : tokens].long()
    return SlotTable(slots.view(tokens, top_k), ends.diff(prepend=ends.new_zeros(1)))


def _flat(ids: Tensor, to: Destinations) -> Tensor:
    dest = first_of_run(to.of(ids))
    rows = torch.arange(len(ids), device=ids.device).unsqueeze(1)
    return torch.where(dest >= 0, own_last(dest, to) * len(ids) + rows, to.number * len(ids))


def own_last(dest: Tensor, to: Destinations) -> Tensor:
    """Renumber destinations so that `to.last` is the last: the others keep their order."""
    if to.last is None:
        return dest
    return torch.where(dest == to.last, to.number - 1, dest - (dest > to.last).to(dest.dtype))


def fixed_slots(ids: Tensor, to: Destinations, capacity: int) -> Tensor:
    """Slots where every destination has a block of `capacity` rows: block times capacity plus t, [T, K] int32."""
    if use_kernels(ids):
        from megatron_ext.dispatch import routing_kernels

        return routing_kernels.fixed_slots(ids, to, capacity)
    dest = first_of_run(to.of(ids))
    rows = torch.arange(len(ids), device=ids.device).unsqueeze(1)
    return torch.where(dest >= 0, own_last(dest, to) * capacity + rows, -1).int()


def count_vector(ids: Tensor, layout: Layout) -> Tensor:
    """Count what this rank sends: [1 + W + N + E + 1] int32.

    The tokens here; rows for each rank and for each node (each token once); choices of each expert; and the sum of all
    these as a check. See `counts.Counts`.
    """
    counted = ids.new_zeros(count_size(layout), dtype=torch.int32)
    count_into(ids, layout, counted)
    return counted


def count_size(layout: Layout) -> int:
    """Numbers in a count vector."""
    return 1 + layout.world + layout.num_nodes + layout.num_experts + 1


def count_into(ids: Tensor, layout: Layout, counted: Tensor) -> None:
    """Write `count_vector` to `counted`, which must be zero."""
    if use_kernels(ids):
        from megatron_ext.dispatch import routing_kernels

        routing_kernels.count(ids, layout, counted)
        return
    size = len(counted) - 1
    bins, start = [], 1
    for dest, number in (
        (first_of_run(all_ranks(layout).of(ids)), layout.world),
        (first_of_run(all_nodes(layout).of(ids)), layout.num_nodes),
        (ids, layout.num_experts),
    ):
        bins.append(torch.where(dest >= 0, dest + start, size))
        start += number
    flat = torch.cat(bins).reshape(-1)
    counted.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    counted[:1] = ids.shape[0]
    counted[-1:] = counted[:-1].sum(dtype=torch.int32)


@dataclass(frozen=True)
class ExpertOrder:
    """How received rows are laid out for the experts.

    Args:
        slots: [M, K] int32, the row of each copy in expert order, -1 for a choice that another rank serves.
        rows: Rows in expert order, padding included.
    """

    slots: Tensor
    rows: int


def expert_slots(local_ids: Tensor, num_local_experts: int, *, align: int = 0) -> SlotTable:
    """Slots of received rows in expert order, by local expert, then by received row; counts with the gaps.

    Args:
        local_ids: [M, K] int64 of the received rows, this rank's experts from 0.
        num_local_experts: L; other numbers are other ranks' experts.
        align: Start every expert at a multiple of this many rows (0 or 1: no gaps).
    """
    to = Destinations(0, num_local_experts, 1)
    table = assign_slots(local_ids, to)
    if align <= 1:
        return table
    gaps = (-table.counts).remainder(align)
    shift = (gaps.cumsum(0) - gaps)[to.of(local_ids).clamp(min=0)]
    return SlotTable(torch.where(table.slots >= 0, table.slots + shift, -1).int(), table.counts + gaps)
