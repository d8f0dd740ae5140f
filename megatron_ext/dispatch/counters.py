"""What was sent: rows and bytes off the rank and off the node, per layer, of the whole expert-parallel group.

The ranks' counts are on the host anyway (`transport.PendingCounts`), so counting costs no collective and no read-back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_ext.dispatch.counts import Counts


@dataclass(frozen=True)
class Traffic:
    """One dispatch of the whole group, one direction.

    Args:
        tokens: Over all ranks.
        rows_off_rank: Rows that left a rank, over both hops.
        rows_off_node: Rows that left a node.
        needed_off_node: Rows that had to: each token once a node. Less than sent only in the static form.
        choices_off_node: Rows that `alltoall` would have sent off the node.
        row_bytes: Bytes of a row on the way out.
    """

    tokens: int
    rows_off_rank: int
    rows_off_node: int
    needed_off_node: int
    choices_off_node: int
    row_bytes: int


def traffic(counts: Counts, *, two_hops: bool, static_capacity: int | None, row_bytes: int) -> Traffic:
    """Work out what a dispatch moves.

    Args:
        counts: All ranks' counts.
        two_hops: Whether rows travel along the rail first.
        static_capacity: Rows of each block of the static form, None for routed rows.
        row_bytes: Bytes of a packed row.
    """
    layout = counts.layout
    world, size, nodes = layout.world, layout.ranks_per_node, layout.num_nodes
    ranks = np.arange(world)
    to_rank = counts.rows_to_rank
    away = (ranks[:, None] // size) != (ranks[None, :] // size)
    other_node = np.arange(nodes)[None, :] != (ranks // size)[:, None]
    needed = int(counts.rows_to_node[other_node].sum())
    choices = counts.choices.reshape(world, nodes, -1).sum(axis=2)
    if two_hops:
        rail = needed if static_capacity is None else world * (nodes - 1) * static_capacity
        other_local = (ranks[:, None] % size) != (ranks[None, :] % size)
        off_rank, off_node = rail + int(to_rank[other_local].sum()), rail
    elif static_capacity is None:
        off_rank, off_node = int(to_rank.sum() - np.trace(to_rank)), int(to_rank[away].sum())
    else:
        off_rank, off_node = world * (world - 1) * static_capacity, world * (world - size) * static_capacity
    return Traffic(int(counts.tokens.sum()), off_rank, off_node, needed, int(choices[other_node].sum()), row_bytes)


@dataclass
class LayerCounter:
    """Sums of a layer since the last reading.

    Args:
        tokens: Tokens dispatched.
        rows_off_rank: Rows out of a rank, dispatch only; combine moves as many back.
        rows_off_node: Rows out of a node, likewise.
        needed_off_node: Of these, rows that had to leave.
        choices_off_node: What one row a choice would be.
        bytes_off_node: Of the way out.
    """

    tokens: int = 0
    rows_off_rank: int = 0
    rows_off_node: int = 0
    needed_off_node: int = 0
    choices_off_node: int = 0
    bytes_off_node: int = 0

    def add(self, one: Traffic) -> None:
        """Count one dispatch."""
        self.tokens += one.tokens
        self.rows_off_rank += one.rows_off_rank
        self.rows_off_node += one.rows_off_node
        self.needed_off_node += one.needed_off_node
        self.choices_off_node += one.choices_off_node
        self.bytes_off_node += one.rows_off_node * one.row_bytes

    def values(self) -> Mapping[str, float]:
        """Per token: rows off the rank and off the node, what was needed, and what `alltoall` would send."""
        tokens = max(self.tokens, 1)
        return {
            "rows_off_rank": self.rows_off_rank / tokens,
            "rows_off_node": self.rows_off_node / tokens,
            "rows_off_node_needed": self.needed_off_node / tokens,
            "choices_off_node": self.choices_off_node / tokens,
        }


@dataclass
class Counters:
    """The counters of all layers of this process, by number."""

    layers: dict[int, LayerCounter] = field(default_factory=dict)

    def add(self, layer: int, one: Traffic) -> None:
        """Count one dispatch of a layer."""
        self.layers.setdefault(layer, LayerCounter()).add(one)

    def take(self) -> dict[int, LayerCounter]:
        """Return the sums and start again."""
        taken, self.layers = self.layers, {}
        return taken
