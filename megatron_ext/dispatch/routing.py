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


@dataclass(frozen=True)
class SlotTable:
    """Where the copies of each row go.

    Args:
        slots: [T, K] int32, the output row of each copy, -1 for none. Rows are ordered by destination (the
            `last` one at the end), then by t.
        ends: [D] int32, the running number of rows up to and including each destination, in output order.
    """

    slots: Tensor
    ends: Tensor


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


def to_ranks(ids: Tensor, layout: Layout) -> Tensor:
    """Destination rank of each choice, [T, K], -1 for none."""
    return ids.div(layout.num_local_experts, rounding_mode="floor")


def to_nodes(ids: Tensor, layout: Layout) -> Tensor:
    """Destination node of each choice, [T, K], -1 for none."""
    return ids.div(layout.num_local_experts * layout.ranks_per_node, rounding_mode="floor")


def to_node_ranks(ids: Tensor, layout: Layout) -> Tensor:
    """Place in this node of each choice's rank, [T, K], -1 where the choice lies in another node."""
    return _inside(
        ids,
        layout.node * layout.ranks_per_node * layout.num_local_experts,
        layout.ranks_per_node * layout.num_local_experts,
        layout.num_local_experts,
    )


def to_local_experts(ids: Tensor, layout: Layout) -> Tensor:
    """Local expert of each choice, [T, K], -1 where another rank holds it."""
    return _inside(ids, layout.rank * layout.num_local_experts, layout.num_local_experts, 1)


def _inside(ids: Tensor, first: int, count: int, size: int) -> Tensor:
    offset = ids - first
    kept = (offset >= 0) & (offset < count)
    return torch.where(kept, offset.div(size, rounding_mode="floor"), -1)


def first_of_run(dest: Tensor) -> Tensor:
    """Blank repeated destinations: [T, K] with -1 where the choice before it has the same destination.

    Examples:
        >>> first_of_run(torch.tensor([[0, 0, 2, 2, -1]])).tolist()
        [[0, -1, 2, -1, -1]]
    """
    repeated = dest[:, 1:] == dest[:, :-1]
    return torch.cat([dest[:, :1], dest[:, 1:].masked_fill(repeated, -1)], dim=1)


def assign_slots(dest: Tensor, num_dest: int, *, last: int | None = None) -> SlotTable:
    """Number the copies of every row, by destination and then by row.

    Args:
        dest: [T, K] int64, the destination of each choice, -1 for none, equal ones next to each other.
        num_dest: D.
        last: The destination that is put at the end (a rank's own copies, which do not travel).
    """
    tokens, top_k = dest.shape
    dest = first_of_run(dest)
    place = dest if last is None else own_last(dest, last, num_dest)
    rows = torch.arange(tokens, device=dest.device).unsqueeze(1)
    # One flat mark a (destination, row), destination-major: a running sum over it numbers the rows. Marks
    # beyond the end collect the empty choices.
    flat = torch.where(dest >= 0, place * tokens + rows, num_dest * tokens)
    marks = torch.zeros(num_dest * tokens + 1, dtype=torch.int32, device=dest.device)
    marks.scatter_(0, flat.reshape(-1), 1)
    running = marks[:-1].cumsum(0, dtype=torch.int32)
    if tokens == 0:
        return SlotTable(dest.int(), marks.new_zeros(num_dest))
    found = running[flat.clamp(max=num_dest * tokens - 1)] - 1
    slots = torch.where(dest >= 0, found, -1)
    return SlotTable(slots.int().view(tokens, top_k), running[tokens - 1 :: tokens].contiguous())


def own_last(dest: Tensor, own: int, num_dest: int) -> Tensor:
    """Renumber destinations so that `own` is the last: the others keep their order."""
    return torch.where(dest == own, num_dest - 1, dest - (dest > own).to(dest.dtype))


def fixed_slots(dest: Tensor, num_dest: int, *, last: int, capacity: int) -> Tensor:
    """Slots where every destination has a block of `capacity` rows: block times capacity plus t, [T, K]
    int32."""
    dest = first_of_run(dest)
    rows = torch.arange(dest.shape[0], device=dest.device).unsqueeze(1)
    return torch.where(dest >= 0, own_last(dest, last, num_dest) * capacity + rows, -1).int()


def count_vector(ids: Tensor, layout: Layout) -> Tensor:
    """Count what this rank sends: [1 + W + N + E + 1] int32.

    The tokens here; rows for each rank and for each node (each token once); choices of each expert; and
    the sum of all these as a check. See `counts.Counts`.
    """
    world, nodes = layout.world, layout.num_nodes
    size = 1 + world + nodes + layout.num_experts
    ranks, places = first_of_run(to_ranks(ids, layout)), first_of_run(to_nodes(ids, layout))
    bins = torch.cat(
        [
            torch.where(ranks >= 0, ranks + 1, size),
            torch.where(places >= 0, places + 1 + world, size),
            torch.where(ids >= 0, ids + 1 + world + nodes, size),
        ]
    ).reshape(-1)
    counted = torch.zeros(size + 1, dtype=torch.int32, device=ids.device)
    counted.scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.int32))
    counted[0] = ids.shape[0]
    counted[-1] = counted[:-1].sum()
    return counted


@dataclass(frozen=True)
class ExpertOrder:
    """How received rows are laid out for the experts.

    Args:
        slots: [M, K] int32, the row of each copy in expert order, -1 for a choice that another rank serves.
        rows: Rows in expert order, padding included.
    """

    slots: Tensor
    rows: int


def expert_slots(ids: Tensor, layout: Layout, *, align: int = 0) -> Tensor:
    """Slots of received rows in expert order: by local expert, then by received row. [M, K] int32.

    Args:
        ids: [M, K] of the received rows.
        layout: The group.
        align: Start every expert at a multiple of this many rows (0 or 1: no gaps).
    """
    dest = to_local_experts(ids, layout)
    table = assign_slots(dest, layout.num_local_experts)
    if align <= 1:
        return table.slots
    counts = torch.diff(table.ends, prepend=table.ends.new_zeros(1))
    gaps = (-counts).remainder(align)
    shift = (gaps.cumsum(0, dtype=torch.int32) - gaps)[dest.clamp(min=0)]
    return torch.where(table.slots >= 0, table.slots + shift, -1).int()
