"""Turn a dense checkpoint into an MoE one: files in, files out, one layer at a time.

This module decides which tensors the new checkpoint has and how each block is made; reading is `source`, writing is
`target`, the arithmetic is `weights` and `router`.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import UserError
from megatron_ext.upcycle import router, weights
from megatron_ext.upcycle import spec as specs
from megatron_ext.upcycle.layout import (
    MLP,
    NOT_MODEL,
    Layer,
    Place,
    decoder_layer,
    is_stacked,
    object_parts,
    understand,
)
from megatron_ext.upcycle.source import RELEASE, Source
from megatron_ext.upcycle.target import Block, Content, saved_bytes

FC1, FC2 = "linear_fc1.weight", "linear_fc2.weight"
BIASES = ("linear_fc1.bias", "linear_fc2.bias")
LINEAR_FC1 = "linear_fc1."
NORM = f"{LINEAR_FC1}layer_norm_"
OWN_NORM = "pre_mlp_layernorm."
NOTE = "upcycle.json"
# What `upcycle.json` says under "kind"; `grow.GROW` is the other.
DENSE = "dense"
COMMON = "common_state/shard_0_1"
# In Megatron's content metadata: MoE layers store their norm as `new_short` names it (checkpoint/local-moe-norm-name).
OWN_NORM_NAME = "local_moe_norm_own_name"


@dataclass(frozen=True)
class Where:
    """The name of the new checkpoint's folder, its tracker's word and its iteration."""

    folder: str
    tracker: str
    iteration: int


def place_in_run(source: Source, *, carry_schedule: bool) -> Where:
    """Say where the MoE run begins: a release (iteration 0, fresh schedule), or the dense run's iteration.

    Raises:
        UserError: The schedule shall be carried but the checkpoint has none.
    """
    if not carry_schedule:
        return Where(RELEASE, RELEASE, 0)
    iteration = int(source.common.get("iteration", 0))
    if not iteration or "opt_param_scheduler" not in source.common:
        raise UserError(
            "the checkpoint has no schedule to carry on",
            where=str(source.folder),
            why="it is a release, or was saved with --no-save-optim",
            remedy="leave --carry-schedule out",
        )
    return Where(f"iter_{iteration:07d}", str(iteration), iteration)


def plan_content(source: Source, dense: specs.Dense, spec: specs.MoeSpec, *, carry_schedule: bool = False,
                 restart_data: bool = False) -> Content:
    """Plan the whole MoE checkpoint; reads only the index.

    Raises:
        UserError: The dense checkpoint lacks tensors, or has some that the conversion does not know.
    """
    common = common_state(source, moe_args(source.args, spec), carry_schedule=carry_schedule,
                          restart_data=restart_data)
    common["content_metadata"] = {**common["content_metadata"], OWN_NORM_NAME: True}
    return Content(
        blocks=tuple(_blocks(source, dense, spec)),
        objects={**dict(_objects(source, spec)), COMMON: saved_bytes(common)},
        notes={NOTE: note(source, dense, spec)},
    )


def common_state(source: Source, args: Namespace, *, carry_schedule: bool, restart_data: bool) -> dict[str, Any]:
    """Return Megatron's common state for the new checkpoint; `args` are the source's with the new shape.

    The optimizer's state is left out: it belongs to other weights.
    """
    where = place_in_run(source, carry_schedule=carry_schedule)
    args = copy.copy(args)
    if restart_data:
        args.consumed_train_samples = args.consumed_valid_samples = args.skipped_train_samples = 0
    args.iteration = where.iteration
    args.no_save_optim = args.no_save_rng = True
    state: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": where.iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": source.common.get("content_metadata", {}),
    }
    if carry_schedule:
        state["opt_param_scheduler"] = source.common["opt_param_scheduler"]
        state["num_floating_point_operations_so_far"] = source.common.get("num_floating_point_operations_so_far", 0)
    return state


def moe_args(dense_args: Namespace, spec: specs.MoeSpec) -> Namespace:
    """Return the dense run's arguments with those of the MoE's shape set, for `--use-checkpoint-args` and checks."""
    args = copy.copy(dense_args)
    args.num_experts = spec.rule.num_experts
    args.moe_ffn_hidden_size = spec.ffn
    args.moe_router_topk = spec.rule.topk
    args.moe_router_score_function = spec.rule.score
    args.moe_router_pre_softmax = spec.rule.pre_softmax
    args.moe_router_topk_scaling_factor = spec.rule.scaling_factor
    args.moe_router_num_groups = spec.rule.num_groups
    args.moe_router_enable_expert_bias = spec.expert_bias
    args.moe_shared_expert_intermediate_size = spec.shared_ffn
    args.moe_shared_expert_gate = spec.shared_gate
    args.moe_layer_freq = spec.layer_freq
    args.transformer_impl = "local" if spec.names == "local" else "transformer_engine"
    args.moe_use_upcycling = False
    args.moe_upcycling_granularity = 1
    return args


def note(source: Source, dense: specs.Dense, spec: specs.MoeSpec) -> dict[str, Any]:
    """Return what `upcycle.json` in the new folder says: where the weights come from and how they were made."""
    count = specs.check(dense, spec)
    return {
        "schema": 1,
        "kind": DENSE,
        "source": str(source.folder.absolute()),
        "source_iteration": source.iteration,
        "consumed_train_samples": getattr(source.args, "consumed_train_samples", 0),
        "dense": asdict(dense),
        "moe": asdict(spec),
        "granularity": count,
        "factors": asdict(specs.scaling(dense, spec, count)),
        "router_std": specs.router_std(dense, spec, count),
        "expectation": asdict(specs.expectation(dense, spec, count)),
    }


def _blocks(source: Source, dense: specs.Dense, spec: specs.MoeSpec) -> Iterator[Block]:
    """Yield every block: first what is copied, then the MoE layers."""
    mlps: dict[str, dict[str, str]] = {}
    layers: dict[str, Layer] = {}
    for name in source.tensors:
        if NOT_MODEL.match(name):
            continue
        for found in understand(name, num_layers=dense.num_layers):
            layer = found.layer
            if layer is None:
                yield from copied(source, name)
            elif is_moe(layer, spec) and found.short.startswith(MLP) and not found.short.startswith(MLP + NORM):
                layers[layer.prefix] = layer
                mlps.setdefault(layer.prefix, {})[found.short.removeprefix(MLP)] = name
            else:
                yield _copied_layer_tensor(source, name, layer, new_short(found.short, layer, spec), spec)
    for number, wanted in enumerate(spec.moe_layers):
        if wanted and decoder_layer(number, dense.num_layers).prefix not in layers:
            raise UserError("a tensor is missing from the checkpoint", where=f"decoder layer {number} has no MLP in "
                            f"{source.folder}", remedy="give the checkpoint of a dense GPT model")

    # One layer's MLP is read once and kept while its experts are written: 4 is the number of its tensors.
    @lru_cache(maxsize=4)
    def read(name: str, layer: Layer) -> Tensor:
        return read_layer(source, name, layer)

    for prefix, parts in mlps.items():
        yield from _moe_blocks(source, dense, spec, layers[prefix], parts, read)


def is_moe(layer: Layer, spec: specs.MoeSpec) -> bool:
    """Say whether a layer becomes an MoE layer; those of the multi-token prediction follow the last decoder layer."""
    return spec.moe_layers[-1 if layer.number is None else layer.number]


def new_short(short: str, layer: Layer, spec: specs.MoeSpec) -> str:
    """Return a copied tensor's name in the MoE: only the norm before an MoE layer is stored under another one.

    Dense layers store that norm as part of linear_fc1, MoE layers on its own. (Local MoE layers of before the patch
    `checkpoint/local-moe-norm-name` store it as dense ones do.)
    """
    fused = MLP + NORM
    if not is_moe(layer, spec) or not short.startswith(fused):
        return short
    return OWN_NORM + short.removeprefix(fused)


def copied(source: Source, name: str) -> Iterator[Block]:
    """Yield a tensor's blocks as they are stored."""
    stored = source.tensors[name]
    for piece in stored.pieces:
        yield Block(name, stored.shape, stored.dtype, piece.offsets, piece.sizes,
                    lambda piece=piece: source.read(name, piece.offsets, piece.sizes))  # type: ignore[misc]


def _copied_layer_tensor(source: Source, name: str, layer: Layer, short: str, spec: specs.MoeSpec) -> Block:
    stored = source.tensors[name]
    shape = own_shape(source, name)
    return block_at(layer.place(short, stacked=spec.uniform), shape, stored.dtype,
                    lambda: read_layer(source, name, layer))


def own_shape(source: Source, name: str) -> tuple[int, ...]:
    """Return the shape of one layer's tensor, without the axis of stacked layers."""
    shape = source.tensor(name).shape
    return shape[1:] if is_stacked(name) else shape


def read_layer(source: Source, name: str, layer: Layer) -> Tensor:
    """Read one layer's tensor, without the axis of stacked layers."""
    return read_at(source, name, (layer.number or 0,) if is_stacked(name) else ())


def read_at(source: Source, name: str, lead: tuple[int, ...]) -> Tensor:
    """Read what lies at these leading indices of a tensor, without their axes."""
    shape = source.tensor(name).shape[len(lead):]
    return source.read(name, (*lead, *(0 for _ in shape)), (*(1 for _ in lead), *shape)).reshape(shape)


def block_at(place: Place, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]) -> Block:
    """Return the block for a layer's (or an expert's) own tensor at its place in the new checkpoint."""
    return Block(
        name=place.name,
        shape=(*place.counts, *shape),
        dtype=dtype,
        offsets=(*place.offsets, *(0 for _ in shape)),
        sizes=(*(1 for _ in place.counts), *shape),
        make=lambda: make().reshape(*(1 for _ in place.counts), *shape),
    )


def _moe_blocks(source: Source, dense: specs.Dense, spec: specs.MoeSpec, layer: Layer,
                parts: dict[str, str], read: Callable[[str, Layer], Tensor]) -> Iterator[Block]:
    _check_parts(source, dense, layer, parts)
    dtype = source.tensors[parts[FC1]].dtype
    new = NewTensors(dense, spec, dtype)
    for short, shape, kind, make in new.beside_experts(layer.prefix):
        yield block_at(layer.place(short, stacked=spec.uniform), shape, kind, make)
    count, factors = new.granularity, new.factors
    for expert in range(spec.rule.num_experts):
        for part, name in parts.items():
            place = layer.place(f"{MLP}experts.experts.{part}", stacked=spec.uniform)
            yield block_at(
                place.inner(expert, spec.rule.num_experts),
                new.expert_shape(part),
                source.tensors[name].dtype,
                lambda part=part, name=name, expert=expert: weights.expert_part(  # type: ignore[misc]
                    part, read(name, layer), expert, granularity=count, gated=dense.gated, scaling=factors
                ),
            )


def _check_parts(source: Source, dense: specs.Dense, layer: Layer, parts: dict[str, str]) -> None:
    wide = dense.ffn * (2 if dense.gated else 1)
    expected: dict[str, tuple[int, ...]] = {FC1: (wide, dense.hidden), FC2: (dense.hidden, dense.ffn)}
    if dense.biases:
        expected |= {BIASES[0]: (wide,), BIASES[1]: (dense.hidden,)}
    where = f"{layer.prefix}mlp in {source.folder}"
    if set(parts) != set(expected):
        raise UserError(
            "the MLP of a layer is not the plain one that its arguments promise",
            where=where,
            why=f"it should have {', '.join(sorted(expected))}; it has {', '.join(sorted(parts))}",
            remedy="give the checkpoint of a dense GPT model",
        )
    for part, shape in expected.items():
        if own_shape(source, parts[part]) != shape:
            raise UserError("a tensor has another shape than the arguments promise", where=f"{part} of {where}",
                            why=f"it is {own_shape(source, parts[part])}, expected {shape}",
                            remedy="the checkpoint mixes two models; take another one")


@dataclass(frozen=True)
class NewTensors:
    """Shapes of the new tensors and the values of those that do not come from the dense MLP."""

    dense: specs.Dense
    spec: specs.MoeSpec
    dtype: torch.dtype

    @property
    def granularity(self) -> int:
        """G."""
        return specs.granularity(self.dense, self.spec)

    @property
    def factors(self) -> weights.Scaling:
        """The scaling of the parts."""
        return specs.scaling(self.dense, self.spec, self.granularity)

    def expert_shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of one tensor of an expert."""
        wide = self.spec.ffn * (2 if self.dense.gated else 1)
        if part == FC2:
            return (self.dense.hidden, self.spec.ffn)
        return {FC1: (wide, self.dense.hidden), BIASES[0]: (wide,)}.get(part, (self.dense.hidden,))

    def beside_experts(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]]:
        """Yield short name, shape, dtype and maker of a layer's router and shared experts."""
        experts, hidden = self.spec.rule.num_experts, self.dense.hidden
        yield "mlp.router.weight", (experts, hidden), self.dtype, lambda: self.router_weight(prefix)
        if self.dense.biases:
            yield "mlp.router.bias", (experts,), self.dtype, lambda: torch.zeros(experts, dtype=self.dtype)
        if self.spec.expert_bias:
            yield "mlp.router.expert_bias", (experts,), torch.float32, lambda: torch.zeros(experts)
        if self.spec.shared_ffn:
            shared = self.spec.shared_ffn
            wide = shared * (2 if self.dense.gated else 1)
            yield ("mlp.shared_experts.linear_fc1.weight", (wide, hidden), self.dtype,
                   lambda: self.drawn(f"{prefix}mlp.shared_experts.linear_fc1.weight", (wide, hidden)))
            yield ("mlp.shared_experts.linear_fc2.weight", (hidden, shared), self.dtype,
                   lambda: torch.zeros(hidden, shared, dtype=self.dtype))
        if self.spec.shared_ffn and self.spec.shared_gate:
            yield ("mlp.shared_experts.gate_weight", (1, hidden), self.dtype,
                   lambda: self.drawn(f"{prefix}mlp.shared_experts.gate_weight", (1, hidden)))

    def router_weight(self, prefix: str) -> Tensor:
        """Return a layer's router weight [E, H]."""
        return router.router_rows(
            num_experts=self.spec.rule.num_experts,
            hidden=self.dense.hidden,
            granularity=self.granularity,
            std=specs.router_std(self.dense, self.spec, self.granularity),
            seed=self.spec.seed,
            name=f"{prefix}mlp.router.weight",
            dtype=self.dtype,
        )

    def drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor drawn as the model's own initialization draws it."""
        return router.normal(shape, std=self.dense.init_std, seed=self.spec.seed, name=name).to(self.dtype)


def _objects(source: Source, spec: specs.MoeSpec) -> Iterator[tuple[str, bytes]]:
    """Yield the layers' non-tensor entries (`_extra_state`), copied, and fresh ones for the experts and their norm."""
    total = len(spec.moe_layers)
    for full_name in source.objects:
        if NOT_MODEL.match(full_name):
            continue
        name, offsets, _ = object_parts(full_name)
        found = next(understand(name, num_layers=total))
        layer = decoder_layer(offsets[0], total) if is_stacked(name) else found.layer
        if layer is None or not (is_moe(layer, spec) and found.short.startswith(MLP)):
            place = None if layer is None else layer.place(found.short, stacked=spec.uniform)
            yield (full_name if place is None else place.object_name()), source.object_bytes(full_name)
        else:
            yield from _expert_objects(found.short.removeprefix(MLP), layer, spec)


def _expert_objects(short: str, layer: Layer, spec: specs.MoeSpec) -> Iterator[tuple[str, bytes]]:
    # An empty byte tensor is Transformer Engine's "no FP8 state yet"; local layers store None.
    empty = saved_bytes(None if spec.names == "local" else torch.empty(0, dtype=torch.uint8))
    for expert in range(spec.rule.num_experts):
        place = layer.place(f"{MLP}experts.experts.{short}", stacked=spec.uniform)
        yield place.inner(expert, spec.rule.num_experts).object_name(), empty
    if spec.shared_ffn:
        yield layer.place(f"{MLP}shared_experts.{short}", stacked=spec.uniform).object_name(), empty
    if spec.names == "te" and short.startswith(LINEAR_FC1):
        # Its norm, on its own now, has such an entry too; Megatron does not load without.
        own = OWN_NORM + short.removeprefix(LINEAR_FC1)
        yield layer.place(own, stacked=spec.uniform).object_name(), empty


def folder_of(root: Path, source: Source, *, carry_schedule: bool) -> Path:
    """Return the folder that the MoE checkpoint will have."""
    return root / place_in_run(source, carry_schedule=carry_schedule).folder
