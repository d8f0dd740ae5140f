"""`dedup` and `twohop` as communication managers of Megatron's flex dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.dispatch import publish, report
from megatron_ext.dispatch.autograd import Room, combine, dispatch, to_experts
from megatron_ext.dispatch.counters import traffic
from megatron_ext.dispatch.engine import Engine, Handle
from megatron_ext.dispatch.errors import DispatchError
from megatron_ext.dispatch.formula import use_static
from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.manager import FlexManager
from megatron_ext.dispatch.options import DispatchOptions
from megatron_ext.dispatch.placement import Placement, place
from megatron_ext.dispatch.transport import Groups, make_groups

_groups: dict[tuple[Any, int, bool], Groups] = {}


class RowManager(FlexManager):
    """The manager of one MoE layer.

    Args:
        dispatcher: Megatron's flex dispatcher: `tp_ep_group`, `tp_size`, `num_local_experts`, `config`.
        two_hops: `twohop` (True) or `dedup`.
    """

    def __init__(self, dispatcher: Any, *, two_hops: bool) -> None:
        """Place the group, make its process groups once, and say what is used."""
        super().__init__(dispatcher)
        config, group = dispatcher.config, dispatcher.tp_ep_group
        setup = publish.session()
        placement = place(group, setup.options)
        used_two_hops = _two_hops(two_hops, placement, setup.options)
        rank = torch.distributed.get_rank(group)
        layout = Layout(placement.world, rank, dispatcher.num_local_experts, placement.ranks_per_node)
        groups = _groups_of(layout, group, used_two_hops)
        sets = layout.num_nodes if groups.rail is not None else layout.world // dispatcher.tp_size
        cheap = use_static(config.num_moe_experts, config.moe_router_topk, sets)
        static = _static(setup.options, setup.max_tokens, cheap=cheap)
        self._engine = Engine(layout, groups, static=static, capacity=setup.max_tokens)
        self._handle: Handle | None = None
        self._room = Room()
        asked = "twohop" if two_hops else "dedup"
        report.note(asked, self._engine, placement, config.num_moe_experts, config.moe_router_topk)

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Bring [T, H] to the ranks of their experts: [M, H]. The two switches are DeepEP's and mean nothing here."""
        assert self._ids is not None, "setup_metadata comes first"
        assert self.token_probs is not None
        rows, weights, handle = dispatch(self._engine, hidden_states, self._ids, self.token_probs)
        self.dispatched_probs, self._handle, self._ids = weights, handle, None
        return rows

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Lay received rows out by expert: rows [R, H] and their weights [R]."""
        assert self._handle is not None, "dispatch comes first"
        assert self.dispatched_probs is not None
        _used_here(self._handle)
        rows, weights, self._order, self.tokens_per_expert = to_experts(
            hidden_states,
            self.dispatched_probs,
            self._handle,
            align=self._align,
            counts_on_device=self._counts_on_device,
            room=self._room,
        )
        return rows, weights

    def combine(
        self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tensor:
        """Bring partial sums home: [M, H] to [T, H]."""
        assert self._handle is not None, "dispatch comes first"
        handle, self._handle, self._order, self.dispatched_probs = self._handle, None, None, None
        # Here rather than before the experts: the device has their work to do meanwhile.
        self._count(handle)
        return combine(self._engine, hidden_states, handle)

    def _count(self, handle: Handle) -> None:
        # Under recompute the forward runs twice, first without gradients: count the one with.
        if not torch.is_grad_enabled():
            return
        first = handle.hops[0].exchange
        capacity = max(first.send_splits, default=0) if first.fixed else None
        publish.session().counters.add(
            self.layer_number,
            traffic(
                handle.counts.wait(),
                two_hops=self._engine.two_hops,
                static_capacity=capacity,
                row_bytes=handle.row_bytes,
            ),
        )


def _two_hops(asked: bool, placement: Placement, options: DispatchOptions) -> bool:
    if not asked or placement.contiguous:
        return asked
    if options.fallback:
        return False
    raise DispatchError(
        "twohop needs expert-parallel ranks in equal, contiguous blocks a node",
        where=f"hosts of the group: {', '.join(placement.hosts)}",
        remedy="place ranks node by node (torchrun does), choose an expert-parallel size that fills nodes, or pass "
        "--moe-ext-dispatch-fallback to run dedup instead",
    )


def _static(options: DispatchOptions, max_tokens: int | None, *, cheap: bool) -> bool:
    if options.form == "static":
        if max_tokens is None:
            raise DispatchError(
                "the static form needs the most tokens a rank can have",
                where="--moe-ext-dispatch-form static",
                why="this run's micro-batches vary in length, or the entry script does not tell their size",
                remedy="pass --moe-ext-dispatch-max-tokens N, or --moe-ext-dispatch-form alltoallv",
                exit_code=64,
            )
        return True
    return cheap and options.form == "auto" and max_tokens is not None


def _groups_of(layout: Layout, group: Any, two_hops: bool) -> Groups:
    """One set of process groups for all layers: NCCL communicators are dear."""
    # By the group itself, not its ranks: groups that were destroyed and made anew have the same ranks.
    key = (group, layout.ranks_per_node, two_hops)
    if key not in _groups:
        _groups[key] = make_groups(layout, group, two_hops=two_hops)
    return _groups[key]


def _used_here(handle: Handle) -> None:
    """Tell the allocator that this stream reads the ids too: under overlap dispatch ran on another one."""
    if handle.ids.is_cuda:
        handle.ids.record_stream(torch.cuda.current_stream())
