"""The counts that the ranks tell each other, and the split sizes that follow. Pure arithmetic on the host
(NumPy).

Every rank sends one vector (see `routing.count_vector`); the gathered matrix has one row a rank. From it
every rank derives all its split sizes, so that sender and receiver cannot disagree unless the matrix
itself is wrong; `check` looks for that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.dispatch.errors import DispatchError
from megatron_ext.dispatch.layout import Layout

Matrix = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Counts:
    """What every rank sends, all ranks' view.

    Args:
        layout: The group, from this rank.
        matrix: [W, 1 + W + N + E + 1], one count vector a rank.
    """

    layout: Layout
    matrix: Matrix

    @property
    def tokens(self) -> Matrix:
        """Tokens on each rank, [W]."""
        return self.matrix[:, 0]

    @property
    def rows_to_rank(self) -> Matrix:
        """Rows that rank s has for rank d, each token once, [W, W]."""
        return self.matrix[:, 1 : 1 + self.layout.world]

    @property
    def rows_to_node(self) -> Matrix:
        """Rows that rank s has for node n, each token once, [W, N]."""
        start = 1 + self.layout.world
        return self.matrix[:, start : start + self.layout.num_nodes]

    @property
    def choices(self) -> Matrix:
        """Choices of rank s for expert e, [W, E]."""
        return self.matrix[:, 1 + self.layout.world + self.layout.num_nodes : -1]

    def tokens_per_local_expert(self) -> Matrix:
        """Rows that each of this rank's experts gets from all ranks, [L]."""
        first = self.layout.first_expert
        return self.choices[:, first : first + self.layout.num_local_experts].sum(axis=0)

    def rank_splits(self) -> tuple[list[int], list[int]]:
        """Rows to send to and to receive from each rank when every row goes straight there; own rows
        included."""
        rank = self.layout.rank
        return self.rows_to_rank[rank].tolist(), self.rows_to_rank[:, rank].tolist()

    def rail_splits(self) -> tuple[list[int], list[int]]:
        """The same for the hop along the rail: one entry a node."""
        layout = self.layout
        received = self.rows_to_node[list(layout.rail), layout.node]
        return self.rows_to_node[layout.rank].tolist(), received.tolist()

    def node_splits(self) -> tuple[list[int], list[int]]:
        """The same for the hop inside the node, after the rail hop: one entry a rank of the node.

        This rank forwards what its rail gathered; peer i forwards what rail i gathered.
        """
        layout = self.layout
        by_rail = self.rows_to_rank.reshape(layout.num_nodes, layout.ranks_per_node, layout.world).sum(axis=0)
        sent = by_rail[layout.local_rank, list(layout.node_ranks)]
        return sent.tolist(), by_rail[:, layout.rank].tolist()

    def check(self, own: Matrix) -> None:
        """Raise `DispatchError` when the matrix cannot be what the ranks counted.

        Args:
            own: This rank's vector as it was sent.
        """
        layout, matrix = self.layout, self.matrix
        if not np.array_equal(matrix[layout.rank], own):
            raise self._wrong("this rank's own counts came back changed", layout.rank)
        bad = (matrix[:, :-1].sum(axis=1) != matrix[:, -1]) | (matrix < 0).any(axis=1)
        if bad.any():
            raise self._wrong("a rank's counts do not add up to their check sum", int(bad.argmax()))
        top = self.tokens[:, None]
        bad = (self.rows_to_rank > top).any(axis=1) | (self.rows_to_node > top).any(axis=1)
        if bad.any():
            raise self._wrong("a rank counts more rows for a destination than it has tokens", int(bad.argmax()))

    def _wrong(self, why: str, rank: int) -> DispatchError:
        return DispatchError(
            "the ranks do not agree on the split sizes of a dispatch",
            where=f"counts of rank {rank}, seen by rank {self.layout.rank}: {self.matrix[rank].tolist()[:12]}...",
            why=why,
            remedy="check that all ranks run the same code and flags; if they do, suspect the network or "
            "a GPU (megatron-moe preflight)",
        )
