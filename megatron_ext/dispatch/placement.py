"""Which ranks share a node: asked once a group, or as the options emulate it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_ext.dispatch.errors import DispatchError
from megatron_ext.dispatch.layout import ranks_per_node_of
from megatron_ext.dispatch.options import DispatchOptions


@dataclass(frozen=True)
class Placement:
    """Where a group's ranks sit.

    Args:
        world: Ranks in the group.
        ranks_per_node: As used: from the hosts, or as emulated. Equals `world` when nodes cannot be used.
        hosts: Host of each rank.
        emulated: Whether the options gave the number.
        contiguous: Whether ranks fill nodes in equal, contiguous blocks.
    """

    world: int
    ranks_per_node: int
    hosts: tuple[str, ...]
    emulated: bool
    contiguous: bool

    @property
    def num_nodes(self) -> int:
        """Nodes of the group."""
        return self.world // self.ranks_per_node


_known: dict[tuple[tuple[int, ...], int], Placement] = {}


def place(group: Any, options: DispatchOptions) -> Placement:
    """Find where the ranks of a group sit. Collective over the group the first time, remembered after it."""
    ranks = tuple(dist.get_process_group_ranks(group))
    key = (ranks, options.ranks_per_node)
    if key not in _known:
        hosts: list[Any] = [None] * len(ranks)
        if len(ranks) > 1:
            dist.all_gather_object(hosts, socket.gethostname(), group=group)
        else:
            hosts = [socket.gethostname()]
        _known[key] = placed(tuple(hosts), options.ranks_per_node)
    return _known[key]


def placed(hosts: tuple[str, ...], emulate: int) -> Placement:
    """Work out the placement from host names.

    Args:
        hosts: One a rank, in group order.
        emulate: Ranks per node to use instead, 0 for as placed.

    Raises:
        DispatchError: the emulated nodes do not divide the group.

    Examples:
        >>> placed(("a", "a", "b", "b"), 0).num_nodes, placed(("a",) * 4, 2).num_nodes
        (2, 2)
        >>> placed(("a", "b", "a", "b"), 0).contiguous
        False
    """
    world = len(hosts)
    if emulate:
        size = min(emulate, world)
        if world % size:
            raise DispatchError(
                "emulated nodes do not divide the group",
                where=f"--moe-ext-dispatch-ranks-per-node {emulate}, expert-parallel group of {world}",
                remedy="choose a divisor of the group's size",
                exit_code=64,
            )
        return Placement(world, size, hosts, True, True)
    found = ranks_per_node_of(hosts)
    return Placement(world, found or world, hosts, False, found is not None)
