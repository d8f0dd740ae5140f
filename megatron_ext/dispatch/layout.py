"""Where ranks, nodes and experts sit. Pure arithmetic.

Ranks of the exchange group are numbered 0..world-1. Rank r sits in node r // ranks_per_node and holds the
experts r * L .. r * L + L - 1. With expert tensor parallelism an "expert" here is one shard of one expert,
which is how Megatron's flex dispatcher numbers them: a token that goes to an expert goes to all of its
shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.dispatch.errors import DispatchError


@dataclass(frozen=True)
class Layout:
    """The shape of one exchange group, seen from one rank.

    Args:
        world: Ranks in the group (EP times expert TP).
        rank: This rank's number in the group.
        num_local_experts: Experts (shards) on every rank, L.
        ranks_per_node: Ranks of the group on one node, R. Must divide `world`.
    """

    world: int
    rank: int
    num_local_experts: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        """Refuse shapes that no group has."""
        if not 0 <= self.rank < self.world:
            raise DispatchError(
                "the rank lies outside its group",
                where=f"rank {self.rank} of {self.world}",
                remedy="pass the rank inside the expert-parallel group, not the global one",
            )
        if self.num_local_experts < 1:
            raise DispatchError(
                "a rank needs at least one expert",
                where=f"num_local_experts={self.num_local_experts}",
                remedy="use an expert-parallel size that divides the number of experts",
            )
        if self.ranks_per_node < 1 or self.world % self.ranks_per_node:
            raise DispatchError(
                "the ranks of the group do not fill whole nodes",
                where=f"{self.world} ranks, {self.ranks_per_node} on a node",
                remedy="use an expert-parallel size that is a multiple of the ranks on a node, or "
                "--moe-flex-dispatcher-backend dedup",
            )

    @property
    def num_experts(self) -> int:
        """Experts (shards) over the whole group, E."""
        return self.world * self.num_local_experts

    @property
    def first_expert(self) -> int:
        """The first of this rank's experts."""
        return self.rank * self.num_local_experts

    @property
    def num_nodes(self) -> int:
        """Nodes that the group spans, N."""
        return self.world // self.ranks_per_node

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """This rank's place in its node."""
        return self.rank % self.ranks_per_node

    @property
    def rail(self) -> tuple[int, ...]:
        """The ranks with this local rank, one a node, ascending."""
        return tuple(range(self.local_rank, self.world, self.ranks_per_node))

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this node, ascending."""
        first = self.node * self.ranks_per_node
        return tuple(range(first, first + self.ranks_per_node))


def ranks_per_node_of(hosts: Sequence[str]) -> int | None:
    """Return how many ranks sit on each node, or None when they do not sit in equal, contiguous blocks.

    Args:
        hosts: One name a rank of the group, in rank order.

    Examples:
        >>> ranks_per_node_of(["a", "a", "b", "b"])
        2
        >>> ranks_per_node_of(["a", "b", "a", "b"]) is None
        True
        >>> ranks_per_node_of(["a", "a", "a", "b"]) is None
        True
    """
    size = next((i for i, host in enumerate(hosts) if host != hosts[0]), len(hosts))
    blocks = [tuple(hosts[i : i + size]) for i in range(0, len(hosts), size)]
    names = [block[0] for block in blocks]
    even = all(len(block) == size and len(set(block)) == 1 for block in blocks)
    return size if even and len(set(names)) == len(names) else None
