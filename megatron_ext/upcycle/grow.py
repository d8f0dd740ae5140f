"""Turn an MoE checkpoint into one with M times the experts: files in, files out, one expert at a time.

As `offline` for a dense source: this module decides which tensors the new checkpoint has and how each block is made.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from torch import Tensor

from megatron_ext.errors import UserError
from megatron_ext.upcycle import grow_weights, offline, router
from megatron_ext.upcycle.grow_spec import Growth, Moe, check, expectation
from megatron_ext.upcycle.layout import NOT_MODEL, Layer, Place, is_stacked, object_parts, split_state, understand
from megatron_ext.upcycle.offline import BIASES, FC1, FC2
from megatron_ext.upcycle.source import Source, damaged
from megatron_ext.upcycle.target import Block, Content, saved_bytes

GROW = "grow"
EXPERTS = "mlp.experts."
EXPERT = f"{EXPERTS}experts."
ROUTER = "mlp.router."
_PARTS = (FC1, FC2, *BIASES)


def plan_content(source: Source, moe: Moe, growth: Growth, *, carry_schedule: bool = False,
                 restart_data: bool = False) -> Content:
    """Plan the whole larger checkpoint; reads only the index.

    Raises:
        UserError: The wish cannot be, or the checkpoint's experts are not stored as its arguments promise.
    """
    check(moe, growth)
    weights = [name for name in source.tensors if not NOT_MODEL.match(name)]
    check_experts(source, weights, number=moe.rule.num_experts, num_layers=moe.num_layers)
    args = grown_args(source.args, moe, growth)
    common = offline.common_state(source, args, carry_schedule=carry_schedule, restart_data=restart_data)
    return Content(
        blocks=tuple(_blocks(source, moe, growth)),
        objects={**dict(_objects(source, growth)), offline.COMMON: saved_bytes(common)},
        notes={offline.NOTE: note(source, moe, growth)},
    )


def grown_args(args: Namespace, moe: Moe, growth: Growth) -> Namespace:
    """Return the run's arguments with the larger MoE's experts and top-k."""
    args = copy.copy(args)
    args.num_experts = moe.rule.num_experts * growth.multiple
    args.moe_router_topk = growth.topk
    return args


def note(source: Source, moe: Moe, growth: Growth) -> dict[str, Any]:
    """Return what `upcycle.json` in the new folder says."""
    return {
        "schema": 1,
        "kind": GROW,
        "source": str(source.folder.absolute()),
        "source_iteration": source.iteration,
        "consumed_train_samples": getattr(source.args, "consumed_train_samples", 0),
        "smaller": asdict(moe),
        "growth": asdict(growth),
        "expectation": asdict(expectation(moe, growth)),
    }


def check_experts(source: Source, names: Iterable[str], *, number: int, num_layers: int) -> None:
    """Check that every expert tensor is one that is understood, of all experts.

    Args:
        source: The checkpoint.
        names: Of its tensors: weights, and states that are stored by the weights' names.
        number: E.
        num_layers: Decoder layers.

    Raises:
        UserError: One is not, or there is none.
    """
    found = 0
    for name in names:
        short = next(understand(split_state(name)[1], num_layers=num_layers)).short
        if not short.startswith(EXPERTS):
            continue
        found += 1
        if short.removeprefix(EXPERT) not in _PARTS:
            raise UserError("the experts are not stored one by one", where=f"{name} in {source.folder}",
                            why=f"expected {EXPERT}{{{', '.join(_PARTS)}}}",
                            remedy="load it with Megatron and save it with --ckpt-format torch_dist, without "
                            "--moe-single-grouped-weight")
        held = offline.own_shape(source, name)[0]
        if held != number:
            raise damaged(f"{name} in {source.folder}", f"it holds {held} experts; the arguments say {number}")
    if not found:
        raise damaged(str(source.folder), f"its arguments say {number} experts, but it holds none")


def _blocks(source: Source, moe: Moe, growth: Growth) -> Iterator[Block]:
    """Yield every block: copied tensors and routers as they come, then the experts."""
    experts: list[tuple[str, Layer, str]] = []
    for name in source.tensors:
        if NOT_MODEL.match(name):
            continue
        found = list(understand(name, num_layers=moe.num_layers))
        short = found[0].short
        if short.startswith(EXPERTS):
            experts += [(name, one.layer, short) for one in found if one.layer]
        elif short.startswith(ROUTER) and offline.own_shape(source, name)[:1] == (moe.rule.num_experts,):
            for one in found:
                if one.layer:
                    yield _router_block(source, moe, growth, name, one.layer, short)
        else:
            yield from offline.copied(source, name)

    # The M copies of an expert are written one after the other, from one read.
    @lru_cache(maxsize=1)
    def read(name: str, layer: Layer, expert: int) -> Tensor:
        return _read_expert(source, name, layer, expert)

    for name, layer, short in experts:
        yield from _expert_blocks(source, moe, growth, name, layer, short, read)


def _router_block(source: Source, moe: Moe, growth: Growth, name: str, layer: Layer, short: str) -> Block:
    shape = offline.own_shape(source, name)
    dtype = source.tensors[name].dtype
    place = layer.place(short, stacked=is_stacked(name))
    return offline.block_at(
        place, (shape[0] * growth.multiple, *shape[1:]), dtype,
        lambda: router_tensor(offline.read_layer(source, name, layer), moe, growth, layer.prefix + short),
    )


def router_tensor(old: Tensor, moe: Moe, growth: Growth, name: str) -> Tensor:
    """Return the larger router's tensor [M * E, ...] (weight, bias or expert bias) from the smaller one's [E, ...].

    Args:
        old: The smaller router's tensor.
        moe: The smaller MoE.
        growth: The wish.
        name: The tensor's name with its layer's prefix; in every draw.
    """
    rows = old.repeat_interleave(growth.multiple, dim=0)
    is_weight = name.endswith("router.weight")
    shifts = [grow_weights.shift(old, growth.router_shift, copy, seed=growth.seed, name=name)
              for copy in range(growth.multiple)] if is_weight and growth.router_shift else []
    for index in range(len(rows)):
        number = index % growth.multiple
        if number == 0:
            continue
        if growth.new_experts == "random":
            std = moe.init_std if is_weight else 0.0
            drawn = router.normal(tuple(rows[index].shape), std=std, seed=growth.seed, name=f"{name}.{index}")
            rows[index] = drawn.to(rows.dtype)
        elif is_weight:
            row = rows[index].float() + (shifts[number] if shifts else 0.0)
            rows[index] = grow_weights.perturbed(row.to(rows.dtype), growth.router_noise, seed=growth.seed,
                                                 name=f"{name}.{index}")
    return rows


def _expert_blocks(source: Source, moe: Moe, growth: Growth, name: str, layer: Layer, short: str,
                   read: Callable[[str, Layer, int], Tensor]) -> Iterator[Block]:
    stored = source.tensors[name]
    shape = offline.own_shape(source, name)[1:]
    total = moe.rule.num_experts * growth.multiple
    part = short.removeprefix(EXPERT)
    place = layer.place(short, stacked=is_stacked(name))
    for index in range(total):
        yield offline.block_at(
            place.inner(index, total), shape, stored.dtype,
            lambda index=index: expert_tensor(  # type: ignore[misc]
                read(name, layer, index // growth.multiple), part, moe, growth, layer.prefix, index
            ),
        )


def expert_tensor(old: Tensor, part: str, moe: Moe, growth: Growth, prefix: str, index: int) -> Tensor:
    """Return one tensor of new expert `index` from that of expert index // M; copy 0 is the expert itself.

    Args:
        old: The old expert's tensor.
        part: `linear_fc1.weight` and so on.
        moe: The smaller MoE.
        growth: The wish.
        prefix: The layer's prefix; in every draw.
        index: j, the new expert.
    """
    if index % growth.multiple == 0:
        return old
    owner, seed = f"{prefix}{EXPERT}{index}", growth.seed
    name = f"{owner}.{part}"
    if growth.new_experts == "random":
        return grow_weights.fresh(part, old, init_std=moe.init_std, num_layers=moe.num_layers, seed=seed, name=name)
    made = old
    if growth.new_experts == "drop" and part != BIASES[1]:
        width = old.shape[1] if part == FC2 else len(old) // (2 if moe.gated else 1)
        channels = grow_weights.dropped_channels(width, growth.drop_share, seed=seed, name=owner)
        made = grow_weights.redrawn(part, old, channels, gated=moe.gated, seed=seed, name=name)
    return grow_weights.perturbed(made, growth.expert_noise, seed=seed, name=f"{name}.noise")


def _read_expert(source: Source, name: str, layer: Layer, expert: int) -> Tensor:
    return offline.read_at(source, name, (layer.number or 0, expert) if is_stacked(name) else (expert,))


def _objects(source: Source, growth: Growth) -> Iterator[tuple[str, bytes]]:
    """Yield non-tensor entries as stored; an expert's once for each of its copies."""
    for full_name in source.objects:
        if NOT_MODEL.match(full_name):
            continue
        name, offsets, counts = object_parts(full_name)
        if f".{EXPERT}" not in name:
            yield full_name, source.object_bytes(full_name)
            continue
        *before, expert = offsets
        for number in range(growth.multiple):
            place = Place(name, (*before, expert * growth.multiple + number),
                          (*counts[:-1], counts[-1] * growth.multiple))
            yield place.object_name(), source.object_bytes(full_name)

