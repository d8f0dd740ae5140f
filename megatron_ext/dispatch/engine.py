"""Dispatch and combine, without autograd: chains of hops over one slot table each.

    dedup    tokens --spread--> exchange over all ranks --> rows
    twohop   tokens --spread--> exchange along the rail --spread--> exchange inside the node --> rows

Out: a row is written once per destination of the hop (`spread_rows`), the exchange carries it. Home: the
exchange carries partial sums back and each row's copies are summed (`sum_rows`), per node first, then at
the token's rank. A rank's own rows never enter an exchange: they lie in the `near` end of each buffer.

The rail hop has a static form for few nodes: every rank sends all its tokens to its rail peers, padded to
a fixed number, so it needs no split sizes and starts before the counts are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.dispatch import routing
from megatron_ext.dispatch.errors import DispatchError
from megatron_ext.dispatch.formula import use_static
from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.rows import copy_rows, spread_rows, sum_rows
from megatron_ext.dispatch.transport import Exchange, Groups, PendingCounts, start_counts
from megatron_ext.dispatch.wire import RowFormat


@dataclass(frozen=True)
class Hop:
    """One hop as kept for the way home.

    Args:
        slots: [T, K] int32: rows below `exchange.rows_out` travel, the rest stay.
        exchange: The traffic.
        rows_near: Rows that stay on this rank.
    """

    slots: Tensor
    exchange: Exchange
    rows_near: int

    @property
    def rows_after(self) -> int:
        """Rows on this rank after the hop: those received, then its own."""
        return self.exchange.rows_in + self.rows_near


@dataclass(frozen=True)
class Handle:
    """What a dispatch leaves behind for combine and for both backward passes.

    Args:
        layout: The group.
        tokens: T.
        hops: In the order of the way out.
        ids: [M, K] int64 of the received rows, counted from this rank's first expert: others' lie below 0 or beyond.
        counts: All ranks' counts, perhaps still on their way.
        row_bytes: Bytes of a packed row, for the counters.
    """

    layout: Layout
    tokens: int
    hops: tuple[Hop, ...]
    ids: Tensor
    counts: PendingCounts
    row_bytes: int

    @property
    def rows(self) -> int:
        """Rows received, M."""
        return self.hops[-1].rows_after


@dataclass(frozen=True)
class Engine:
    """A dispatcher over given groups.

    Args:
        layout: The group.
        groups: Its process groups; with rail and node groups there are two hops.
        static: Fixed sizes in the first hop: True, False, or None to choose by the number of destinations
            and top-k.
        capacity: Tokens that a rank may have in the static form; the same on all ranks. None means that
            all ranks always have as many as this one has now.
    """

    layout: Layout
    groups: Groups
    static: bool | None = None
    capacity: int | None = None

    @property
    def two_hops(self) -> bool:
        """Whether rows travel along the rail first."""
        return self.groups.rail is not None

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Handle]:
        """Bring every token once to each rank that holds one of its experts.

        Args:
            x: [T, H].
            ids: [T, K] int64, ascending, -1 for an empty choice.
            weights: [T, K], the weight of each choice.

        Returns:
            The received rows [M, H] (a view of packed rows: not contiguous), their weights [M, K] and the
            handle.
        """
        form = RowFormat(x.shape[1], ids.shape[1], x.dtype, weights.dtype, self.layout.num_experts)
        counts = self._start_counts(ids)
        # Before the wait for the counts, so that the GPU has this to do meanwhile and nothing but rows after it.
        meta = None if self.is_static(ids.shape[1]) else form.pack_meta(weights, ids)
        hop, near_from = self._first_hop(ids, counts)
        packed = x.new_empty(hop.rows_after, form.row_bytes, dtype=torch.uint8)
        send = packed.new_empty(0 if hop.exchange.fixed else hop.exchange.rows_out, form.row_bytes)
        near = packed[near_from:]
        if meta is None:
            _fill(form, x, weights, ids, near)
            hop.exchange.share(near, packed[:near_from])
        else:
            spread_rows(x, hop.slots, form.hidden_view(send), form.hidden_view(near))
            spread_rows(meta, hop.slots, form.meta_view(send), form.meta_view(near))
            hop.exchange.go(send, packed[:near_from])
        del send
        hops = [hop]
        if self.two_hops:
            second = self._second_hop(form.unpack_meta(packed)[1], counts)
            packed = _carry(second, packed)
            hops.append(second)
        row_weights, row_ids = form.unpack_meta(packed, self.layout.first_expert)
        handle = Handle(self.layout, len(x), tuple(hops), row_ids, counts, form.row_bytes)
        return form.hidden_view(packed), row_weights, handle

    def _start_counts(self, ids: Tensor) -> PendingCounts:
        layout = self.layout
        gathered = ids.new_zeros(layout.world + 1, routing.count_size(layout), dtype=torch.int32)
        routing.count_into(ids, layout, gathered[-1])
        return start_counts(gathered, layout, self.groups.world)

    def _first_hop(self, ids: Tensor, counts: PendingCounts) -> tuple[Hop, int]:
        layout = self.layout
        if self.two_hops:
            to, me, group, name = routing.all_nodes(layout), layout.node, self.groups.rail, "the rail hop"
        else:
            to, me, group, name = routing.all_ranks(layout), layout.rank, self.groups.world, "the all-to-all"
        if self.is_static(ids.shape[1]):
            capacity = self._capacity(len(ids))
            splits = tuple(0 if peer == me else capacity for peer in range(to.number))
            slots = routing.fixed_slots(ids, to, capacity)
            return Hop(slots, Exchange(group, layout, name, me, splits, splits, fixed=True), capacity), sum(splits)
        slots = routing.assign_slots(ids, to).slots
        known = counts.wait()
        send, recv = known.rail_splits() if self.two_hops else known.rank_splits()
        return _hop(slots, group, layout, name, me, send, recv)

    def _second_hop(self, ids: Tensor, counts: PendingCounts) -> Hop:
        layout = self.layout
        slots = routing.assign_slots(ids, routing.node_ranks(layout)).slots
        send, recv = counts.wait().node_splits()
        return _hop(slots, self.groups.node, layout, "the node hop", layout.local_rank, send, recv)[0]

    def is_static(self, top_k: int) -> bool:
        """Whether the first hop has fixed sizes, for this many choices a token."""
        if self.static is not None:
            return self.static
        layout = self.layout
        sets = layout.num_nodes if self.two_hops else layout.world
        return use_static(layout.num_experts, top_k, sets)

    def _capacity(self, tokens: int) -> int:
        if self.capacity is None:
            return tokens
        if tokens > self.capacity:
            raise DispatchError(
                "more tokens on a rank than the static form has room for",
                where=f"rank {self.layout.rank}: {tokens} tokens, capacity {self.capacity}",
                remedy="--moe-ext-dispatch-form alltoallv, which follows the counts of each step",
            )
        return self.capacity

    def send_rows(self, rows: Tensor, handle: Handle) -> Tensor:
        """Carry rows [T, H] the way out again, along a kept handle: [M, H]. The backward of `combine`."""
        for hop in handle.hops:
            rows = _carry(hop, rows)
        return rows

    def combine(self, rows: Tensor, handle: Handle) -> Tensor:
        """Bring partial sums home: [M, H] to [T, H], each the sum over the ranks that had the token.

        Sums run in fp32 in a fixed order and are rounded to the rows' dtype once a hop.
        """
        for hop in reversed(handle.hops):
            rows = _carry_home(hop, rows)
        return rows


def _hop(
    slots: Tensor, group: object, layout: Layout, name: str, me: int, send: list[int], recv: list[int]
) -> tuple[Hop, int]:
    near = send[me]
    send[me] = recv[me] = 0
    hop = Hop(slots, Exchange(group, layout, name, me, tuple(send), tuple(recv)), near)
    return hop, hop.exchange.rows_in


def _fill(form: RowFormat, x: Tensor, weights: Tensor, ids: Tensor, near: Tensor) -> None:
    """The static form: write all tokens to `near`, the rows behind them as empty ones."""
    _put_first(x, form.hidden_view(near))
    form.write_meta(weights, ids, form.meta_view(near))


def _put_first(rows: Tensor, near: Tensor) -> None:
    """Write rows to the first ones of `near`, zeros to those behind."""
    copy_rows(rows, near[: len(rows)])
    if len(near) > len(rows):
        near[len(rows) :] = 0


def _carry(hop: Hop, rows: Tensor) -> Tensor:
    """Take rows of any format through one hop."""
    exchange = hop.exchange
    out = rows.new_empty(hop.rows_after, rows.shape[1])
    near = out[exchange.rows_in :]
    if exchange.fixed:
        _put_first(rows, near)
        exchange.share(near, out[: exchange.rows_in])
        return out
    send = rows.new_empty(exchange.rows_out, rows.shape[1])
    spread_rows(rows, hop.slots, send, near)
    exchange.go(send, out[: exchange.rows_in])
    return out


def _carry_home(hop: Hop, rows: Tensor) -> Tensor:
    exchange = hop.exchange
    far = rows.new_empty(exchange.rows_out, rows.shape[1])
    exchange.back(rows[: exchange.rows_in], far)
    out = rows.new_empty(len(hop.slots), rows.shape[1])
    sum_rows(hop.slots, far, rows[exchange.rows_in :], out)
    return out
