"""The collectives of a dispatch: the exchange of counts, rows by all-to-all-v, and rows of fixed size.
Nothing else here talks to another rank.

Every call names what it was doing when a collective fails: a dead rank shows on the others as a
`DispatchError` that says which exchange of which group broke, instead of a bare backend message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.dispatch.counts import Counts
from megatron_ext.dispatch.errors import DispatchError
from megatron_ext.dispatch.layout import Layout

Group = Any  # dist.ProcessGroup; its type is not public in every torch


@dataclass(frozen=True)
class Groups:
    """The process groups of one exchange group, from this rank.

    Args:
        world: All ranks of the exchange group, in layout order.
        rail: Same local rank on every node (None for one node).
        node: The ranks of this node (None where a node holds one rank).
    """

    world: Group
    rail: Group = None
    node: Group = None


def make_groups(layout: Layout, world: Group, *, two_hops: bool) -> Groups:
    """Create the rail and node groups beside `world`.

    Collective over `world` only: ranks outside it take no part, so pipeline stages without experts need
    not call.
    """
    if not two_hops or layout.num_nodes == 1 or layout.ranks_per_node == 1:
        return Groups(world)
    members = dist.get_process_group_ranks(world)

    def group(ranks: Sequence[int]) -> Group:
        return dist.new_group([members[r] for r in ranks], use_local_synchronization=True)

    return Groups(world, rail=group(layout.rail), node=group(layout.node_ranks))


@dataclass
class PendingCounts:
    """Counts on their way to the host: `wait` returns them, once read, without stopping the GPU's queue.

    Args:
        layout: The group.
        gathered: [W + 1, n] on the host (pinned for a GPU): all vectors, then this rank's own as it was sent.
        event: Set when the copy is done; None where there was nothing to wait for.
    """

    layout: Layout
    gathered: Tensor
    event: Any
    _counts: Counts | None = field(default=None, repr=False)

    @property
    def known(self) -> bool:
        """Whether the host has them already."""
        return self._counts is not None

    def wait(self) -> Counts:
        """Return the checked counts. The only host synchronization of a dispatch."""
        if self._counts is None:
            if self.event is not None:
                self.event.synchronize()
            matrix = self.gathered.numpy().astype(np.int64)
            self._counts = Counts(self.layout, matrix[:-1])
            self._counts.check(matrix[-1])
        return self._counts


def start_counts(gathered: Tensor, layout: Layout, group: Group) -> PendingCounts:
    """Gather every rank's count vector and start its copy to the host.

    Args:
        gathered: [W + 1, n] int32 with this rank's `routing.count_vector` in the last row; the others are written. So
            one copy brings the vector as it was sent along with what came back.
        layout: The group.
        group: Its process group.
    """
    with _named("the exchange of counts", layout, gathered):
        dist.all_gather_into_tensor(gathered[:-1].view(-1), gathered[-1], group=group)
    if not gathered.is_cuda:
        return PendingCounts(layout, gathered, None)
    host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
    host.copy_(gathered, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return PendingCounts(layout, host, event)


@dataclass(frozen=True)
class Exchange:
    """One hop's traffic of this rank: how many rows to and from each other rank of the hop's group.

    Args:
        group: The hop's process group.
        layout: For messages.
        name: The hop, for messages.
        me: This rank's place in the group.
        send_splits: Rows to each rank of the group; 0 for this rank, whose rows do not travel.
        recv_splits: Rows from each.
        fixed: Every rank sends the same rows to all others (the static form).
    """

    group: Group
    layout: Layout
    name: str
    me: int
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    fixed: bool = False

    @property
    def rows_out(self) -> int:
        """Rows that leave, or that come back on the way home."""
        return sum(self.send_splits)

    @property
    def rows_in(self) -> int:
        """Rows that arrive."""
        return sum(self.recv_splits)

    def go(self, send: Tensor, recv: Tensor) -> None:
        """Send rows out: `send` [rows_out, C] to `recv` [rows_in, C], both contiguous, ordered by peer."""
        self._exchange(send, recv, self.send_splits, self.recv_splits)

    def share(self, own: Tensor, recv: Tensor) -> None:
        """The static form: send the same rows `own` [capacity, C] to every peer."""
        peers = [r for r in range(len(self.send_splits)) if r != self.me]
        if not peers or own.numel() == 0:
            return
        if len(peers) == 1:
            self._exchange(own, recv, self.send_splits, self.recv_splits)
            return
        blocks = recv.view(torch.uint8).view(len(peers), -1)
        flat = own.view(torch.uint8).view(-1)
        names = dist.get_process_group_ranks(self.group)
        with _named(self.name, self.layout, own):
            steps = [dist.P2POp(dist.isend, flat, names[peer], self.group) for peer in peers]
            steps += [
                dist.P2POp(dist.irecv, block, names[peer], self.group)
                for peer, block in zip(peers, blocks.unbind(0), strict=True)
            ]
            for work in dist.batch_isend_irecv(steps):
                work.wait()

    def back(self, send: Tensor, recv: Tensor) -> None:
        """Send rows home: `send` [rows_in, C] to `recv` [rows_out, C]."""
        self._exchange(send, recv, self.recv_splits, self.send_splits)

    def _exchange(self, send: Tensor, recv: Tensor, out: Sequence[int], back: Sequence[int]) -> None:
        if len(send) != sum(out) or len(recv) != sum(back):
            raise DispatchError(
                f"the rows at hand do not match the split sizes of {self.name}",
                where=f"rank {self.layout.rank}: {len(send)} rows to send for splits {list(out)}, room for "
                f"{len(recv)} for splits {list(back)}",
                remedy="this is a fault of the dispatcher: please report it with the flags of the run",
            )
        if len(self.send_splits) == 1 or send.shape[1] == 0:
            return
        with _named(self.name, self.layout, send):
            # Bytes: gloo knows few dtypes, and a row is only carried here.
            dist.all_to_all_single(
                recv.view(torch.uint8), send.view(torch.uint8), list(back), list(out), group=self.group
            )


@contextmanager
def _named(what: str, layout: Layout, tensor: Tensor) -> Iterator[None]:
    try:
        yield
    except DispatchError:
        raise
    except RuntimeError as error:
        raise DispatchError(
            f"{what} of a dispatch failed",
            where=f"rank {layout.rank} of {layout.world}, node {layout.node}, "
            f"{tuple(tensor.shape)} on {tensor.device}",
            why=str(error).strip().splitlines()[0][:300],
            remedy="look for the first rank that stopped: its log has the cause, the others only lost "
            "their peer",
        ) from error
