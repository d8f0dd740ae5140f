"""A checkpoint with its experts numbered anew: files in, files out, one expert at a time.

Weights, the optimizer's state for them, the router's rows and biases and the experts' small entries move together;
everything else, the common and random states included, is copied byte for byte. So the run goes on at the same step,
with the same data and the same schedule, and the model is the same function up to the order of sums.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_ext.errors import UserError
from megatron_ext.place.balance import Order
from megatron_ext.upcycle.grow import EXPERT, ROUTER, check_experts
from megatron_ext.upcycle.layout import (
    NOT_MODEL,
    OPTIMIZER,
    Layer,
    Place,
    is_stacked,
    object_parts,
    split_state,
    understand,
)
from megatron_ext.upcycle.offline import block_at, copied, own_shape, read_at
from megatron_ext.upcycle.source import Source
from megatron_ext.upcycle.target import Block, Content

NOTE = "placement.json"
_BY_PLACE = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.")


@dataclass(frozen=True)
class Experts:
    """The experts of a checkpoint.

    Attributes:
        number: E.
        layers: Decoder layers.
        ranks: Expert-parallel size of the run that saved it.
    """

    number: int
    layers: int
    ranks: int


def experts_of(source: Source) -> Experts:
    """Return what the checkpoint's arguments say of its experts.

    Raises:
        UserError: It has none, or their numbers mean something to the router.
    """
    args = source.args
    number = getattr(args, "num_experts", None)
    if (source.folder / NOTE).is_file():
        raise UserError("the checkpoint's experts were placed already, and not trained since", where=str(source.folder),
                        why=f"its {NOTE}: what the run counted is by the old numbers",
                        remedy="train on from it, then place by what that run counts")
    if not number:
        raise UserError("the checkpoint has no experts", where=str(source.folder), remedy="give an MoE's checkpoint")
    if getattr(args, "moe_router_num_groups", None):
        raise UserError(
            "experts in routing groups cannot be numbered anew",
            where=str(source.folder),
            why=f"its router first chooses among {args.moe_router_num_groups} groups of consecutive experts",
            remedy="balance them with --moe-router-load-balancing-type seq_aux_loss or an expert bias",
        )
    return Experts(int(number), int(args.num_layers), int(getattr(args, "expert_model_parallel_size", 1) or 1))


def plan_content(source: Source, orders: Mapping[int, Order], note: Mapping[str, Any], *,
                 weights_only: bool = False) -> Content:
    """Plan the whole checkpoint; reads only the index.

    Args:
        source: The checkpoint.
        orders: By decoder layer from 0: [E], `order[new]` is an expert's number now. Other layers stay as they are.
        note: What `placement.json` says.
        weights_only: Leave the optimizer's state out.

    Raises:
        UserError: The experts or the optimizer's state are not stored by expert.
    """
    experts = experts_of(source)
    kept = [name for name in source.tensors if not (weights_only and OPTIMIZER.match(name))]
    if not weights_only:
        _check_state(source)
    check_experts(source, filter(_is_model, kept), number=experts.number, num_layers=experts.layers)
    blocks = [block for name in kept for block in _blocks(source, experts, orders, name)]
    return Content(blocks, dict(_objects(source, experts, orders, weights_only=weights_only)), {NOTE: note})


def _is_model(name: str) -> bool:
    """Say whether a name is a weight's, or that of a state stored by the weight's name."""
    return bool(split_state(name)[0]) or not NOT_MODEL.match(name)


def _check_state(source: Source) -> None:
    by_place = next((name for name in source.tensors if _BY_PLACE.match(name)), None)
    if by_place:
        raise UserError(
            "the optimizer's state is stored by its place in a buffer, not by weight",
            where=f"{by_place} in {source.folder}",
            why="that is the distributed optimizer's default format",
            remedy="load it once with the same layout and save with --dist-ckpt-optim-fully-reshardable; or pass "
            "--weights-only and train on with --no-load-optim",
        )


def _blocks(source: Source, experts: Experts, orders: Mapping[int, Order], name: str) -> Iterator[Block]:
    if not _is_model(name):
        yield from copied(source, name)
        return
    found = [one for one in understand(split_state(name)[1], num_layers=experts.layers) if one.layer is not None]
    shape = own_shape(source, name)
    short = found[0].short if found else ""
    is_expert = short.startswith(EXPERT)
    is_router = short.startswith(ROUTER) and shape[:1] == (experts.number,)
    if not (is_expert or is_router) or not any(_order(orders, one.layer) is not None for one in found):
        yield from copied(source, name)
        return
    for one in found:
        assert one.layer is not None
        order = _order(orders, one.layer)
        order = order if order is not None else np.arange(experts.number)
        make = _expert_blocks if is_expert else _router_blocks
        yield from make(source, name, one.layer, short, order)


def _order(orders: Mapping[int, Order], layer: Layer | None) -> Order | None:
    return None if layer is None or layer.number is None else orders.get(layer.number)


def _place(name: str, layer: Layer, short: str) -> Place:
    place = layer.place(short, stacked=is_stacked(name))
    return replace(place, name=split_state(name)[0] + place.name)


def _expert_blocks(source: Source, name: str, layer: Layer, short: str, order: Order) -> Iterator[Block]:
    stored, place = source.tensors[name], _place(name, layer, short)
    for new, old in enumerate(order.tolist()):
        lead = (*place.offsets, old)
        yield block_at(place.inner(new, len(order)), stored.shape[len(lead):], stored.dtype,
                       lambda lead=lead: read_at(source, name, lead))  # type: ignore[misc]


def _router_blocks(source: Source, name: str, layer: Layer, short: str, order: Order) -> Iterator[Block]:
    stored, place = source.tensors[name], _place(name, layer, short)
    yield block_at(place, stored.shape[len(place.offsets):], stored.dtype,
                   lambda: read_at(source, name, place.offsets)[torch.from_numpy(order)])


def _objects(source: Source, experts: Experts, orders: Mapping[int, Order], *,
             weights_only: bool) -> Iterator[tuple[str, bytes]]:
    """Yield non-tensor entries as stored; an expert's under its new number."""
    for full_name in source.objects:
        if weights_only and OPTIMIZER.match(full_name):
            continue
        name, offsets, counts = object_parts(full_name)
        if f".{EXPERT}" not in name:
            yield full_name, source.object_bytes(full_name)
            continue
        *before, old = offsets
        layer = None if before else next(understand(name, num_layers=experts.layers)).layer
        order = orders.get(before[0]) if before else _order(orders, layer)
        new = old if order is None else order.tolist().index(old)
        yield Place(name, (*before, new), counts).object_name(), source.object_bytes(full_name)
