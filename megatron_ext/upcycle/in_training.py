"""Upcycling inside a training start (`--moe-use-upcycling`): what patched Megatron calls (patches/upcycle/*).

The arithmetic is the offline path's, on whole tensors gathered over the tensor-parallel ranks one layer at a time, so
that both paths give the same bits under any parallel layout.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.errors import UserError
from megatron_ext.upcycle import flags, offline, weights
from megatron_ext.upcycle import spec as specs
from megatron_ext.upcycle.offline import BIASES, FC1, FC2
from megatron_ext.upcycle.router import RouterRule
from megatron_ext.upcycle.source import TRACKER, open_source

# What a dense model's arguments must not have, and what stands there instead while the dense model is built.
_DENSE_VALUES: dict[str, Any] = {
    "moe_layer_freq": 1,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_enable_expert_bias": False,
}
# Flags under which the experts are not the plain ones that the conversion knows: reason by flag.
_REFUSED = {
    "moe_latent_size": "latent experts have another input width than the dense MLP",
    "moe_mlp_glu_interleave_size": "interleaved gates are stored in another order",
    "moe_single_grouped_weight": "one grouped tensor holds all experts",
    "moe_router_force_load_balancing": "the random router breaks the slice groups",
    "moe_expert_capacity_factor": "tokens that are dropped at the start lose the dense model's output",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add our flags to Megatron's parser."""
    group = parser.add_argument_group("megatron-moe: upcycling")
    group.add_argument("--moe-ext-upcycle-scaling", default="exact", choices=("exact", "megatron", "none"),
                       help="with --moe-use-upcycling: scale the last projection alone (exact, default), every "
                       "projection as Megatron does, or none")


def begin(args: Namespace) -> dict[str, Any]:
    """Check the arguments, make those of the MoE's shape dense, and return what they were (for `end`).

    Called before the dense model is built.

    Raises:
        UserError: The combination cannot be upcycled, or the dense checkpoint has another shape; nothing is written.
    """
    check(args)
    kept = {name: getattr(args, name) for name in _DENSE_VALUES if hasattr(args, name)}
    for name in kept:
        setattr(args, name, _DENSE_VALUES[name])
    return kept


def end(args: Namespace, kept: dict[str, Any]) -> None:
    """Give the MoE's arguments back."""
    for name, value in kept.items():
        setattr(args, name, value)


def check(args: Namespace) -> None:
    """Check Megatron's arguments and the dense checkpoint against each other.

    Raises:
        UserError: The first thing that cannot work.
    """
    for name, why in _REFUSED.items():
        if getattr(args, name, None):
            raise UserError("upcycling does not work with this flag", where=f"--{name.replace('_', '-')}", why=why,
                            remedy="leave the flag out for the upcycled run")
    if "sinkhorn" in str(args.moe_router_load_balancing_type):
        raise UserError("upcycling does not work with this flag", where="--moe-router-load-balancing-type sinkhorn",
                        why="its router weights do not add up to a known sum", remedy="use aux_loss")
    if args.ckpt_format != "torch_dist":
        raise UserError("upcycling needs torch_dist checkpoints", where=f"--ckpt-format {args.ckpt_format}",
                        remedy="pass --ckpt-format torch_dist")
    source = open_source(Path(args.load))
    dense = specs.dense_from_args(source.args)
    wanted = args.ffn_hidden_size * args.moe_upcycling_granularity
    if dense.ffn != wanted:
        raise UserError(
            "the dense checkpoint's MLP has another width",
            where=f"{dense.ffn} in {source.folder}; --ffn-hidden-size {args.ffn_hidden_size} times "
            f"--moe-upcycling-granularity {args.moe_upcycling_granularity} is {wanted}",
            why="the dense model is built with that product; the number of slices follows from --moe-ffn-hidden-size",
            remedy=f"pass --ffn-hidden-size {dense.ffn} --moe-upcycling-granularity 1, and the experts' width as "
            "--moe-ffn-hidden-size",
        )
    specs.check(dense, spec_from_args(args, dense))


def spec_from_args(args: Namespace, dense: specs.Dense) -> specs.MoeSpec:
    """Return the wish that Megatron's arguments stand for."""
    freq = flags.parse_layer_freq(args.moe_layer_freq)
    return specs.MoeSpec(
        rule=RouterRule(
            num_experts=args.num_experts,
            topk=args.moe_router_topk,
            score=args.moe_router_score_function,
            pre_softmax=args.moe_router_pre_softmax,
            scaling_factor=args.moe_router_topk_scaling_factor,
            num_groups=args.moe_router_num_groups,
        ),
        ffn=args.moe_ffn_hidden_size or args.ffn_hidden_size,
        moe_layers=flags.moe_layers(freq, dense.num_layers),
        uniform=freq == 1,
        layer_freq=freq,
        scaling=getattr(args, "moe_ext_upcycle_scaling", "exact"),
        seed=args.seed,
        shared_ffn=args.moe_shared_expert_intermediate_size,
        shared_gate=args.moe_shared_expert_gate,
        expert_bias=args.moe_router_enable_expert_bias,
        names=dense.names,
    )


def convert(moe_model: Any, dense_model: Any, *, scaling: weights.ScalingName = "exact",
            seed: int | None = None) -> dict[str, Tensor]:
    """Return the state dict of one MoE model chunk made from the dense chunk of the same layers.

    Args:
        moe_model: Megatron's MoE model chunk, without wrappers.
        dense_model: The dense one, wrapped or not.
        scaling: See `spec.MoeSpec`.
        seed: For what is drawn; None takes the run's --seed.
    """
    dense_state = dense_model.state_dict()
    state = {name: dense_state.get(name, value) for name, value in moe_model.state_dict().items()}
    chosen, run_seed = _run_choices(scaling, seed)
    for name, module in moe_model.named_modules():
        if _is_moe_layer(module):
            state |= _moe_layer(name, module, moe_model, dense_state, state, chosen, run_seed)
    return state


def _run_choices(scaling: weights.ScalingName, seed: int | None) -> tuple[weights.ScalingName, int]:
    if seed is not None:
        return scaling, seed
    from megatron.training import get_args

    args = get_args()
    return getattr(args, "moe_ext_upcycle_scaling", scaling), args.seed


def _is_moe_layer(module: Any) -> bool:
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    return isinstance(module, BaseMoELayer)


def _moe_layer(name: str, mlp: Any, model: Any, dense_state: dict[str, Tensor], state: dict[str, Tensor],
               scaling: weights.ScalingName, seed: int) -> dict[str, Tensor]:
    """Return the tensors of one MoE layer, and of the norm in front of it, on this rank."""
    owner = name.removesuffix("mlp")
    parts = {part: _whole(part, dense_state[f"{name}.{part}"], mlp.config.gated_linear_unit)
             for part in (FC1, FC2, *BIASES) if f"{name}.{part}" in dense_state}
    dense, spec = _shapes(mlp, parts, scaling, seed)
    count = specs.check(dense, spec)
    new = offline.NewTensors(dense, spec, parts[FC1].dtype)
    result = _norm(owner, dense_state, state)
    for short, _, _, make in new.beside_experts(_global_prefix(owner, model)):
        key = f"{owner}{short}"
        if key in state:
            result[key] = _shared_shard(short, make().to(parts[FC1].device), mlp.config.gated_linear_unit)
    first = mlp.ep_group.rank() * mlp.num_local_experts
    for local in range(mlp.num_local_experts):
        for part, tensor in parts.items():
            whole = weights.expert_part(part, tensor, first + local, granularity=count, gated=dense.gated,
                                        scaling=new.factors)
            result[_expert_key(name, part, local, state)] = _expert_shard(part, whole, dense.gated)
    return result


def _shapes(mlp: Any, parts: dict[str, Tensor], scaling: weights.ScalingName,
            seed: int) -> tuple[specs.Dense, specs.MoeSpec]:
    config = mlp.config
    function = config.activation_func.__name__
    activation = {"silu": "swiglu" if config.gated_linear_unit else "silu"}.get(function, function)
    dense = specs.Dense(1, config.hidden_size, parts[FC2].shape[1], config.gated_linear_unit, activation,
                        BIASES[0] in parts, "te", config.init_method_std)
    rule = RouterRule(config.num_moe_experts, config.moe_router_topk, config.moe_router_score_function,
                      config.moe_router_pre_softmax, config.moe_router_topk_scaling_factor,
                      config.moe_router_num_groups)
    spec = specs.MoeSpec(rule, config.moe_ffn_hidden_size, (True,), scaling=scaling, seed=seed,
                         shared_ffn=config.moe_shared_expert_intermediate_size,
                         shared_gate=bool(config.moe_shared_expert_gate),
                         expert_bias=config.moe_router_enable_expert_bias)
    return dense, spec


def _norm(owner: str, dense_state: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transformer Engine's dense layers fuse the norm into linear_fc1; its MoE layers have it on its own."""
    fused, own = f"{owner}mlp.linear_fc1.layer_norm_", f"{owner}pre_mlp_layernorm."
    return {f"{own}{kind}": dense_state[f"{fused}{kind}"] for kind in ("weight", "bias")
            if f"{fused}{kind}" in dense_state and f"{own}{kind}" in state}


def _global_prefix(owner: str, model: Any) -> str:
    """Return the layer's prefix as checkpoints name it: numbers are global there and local in a chunk."""
    layer = model.get_submodule(owner.removesuffix("."))
    if owner.startswith("decoder."):
        return f"decoder.layers.{layer.layer_number - 1}."
    return f"mtp.layers.{owner.split('.')[2]}.transformer_layer."


def _expert_key(name: str, part: str, local: int, state: dict[str, Tensor]) -> str:
    linear, kind = part.split(".")
    sequential = f"{name}.experts.local_experts.{local}.{part}"
    return sequential if sequential in state else f"{name}.experts.{linear}.{kind}{local}"


def _whole(part: str, shard: Tensor, gated: bool) -> Tensor:
    """Gather a dense MLP's tensor over the tensor-parallel ranks."""
    from megatron.core import parallel_state as mpu

    group, size = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_world_size()
    if size == 1 or part == BIASES[1]:
        return shard.detach()
    shards = [torch.empty_like(shard) for _ in range(size)]
    torch.distributed.all_gather(shards, shard.detach().contiguous(), group=group)
    if part == FC2:
        return torch.cat(shards, dim=1)
    if not gated:
        return torch.cat(shards, dim=0)
    halves = [torch.chunk(one, 2, dim=0) for one in shards]
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves], dim=0)


def _expert_shard(part: str, whole: Tensor, gated: bool) -> Tensor:
    from megatron.core import parallel_state as mpu

    return _shard(part, whole, mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size(),
                  gated)


def _shared_shard(short: str, whole: Tensor, gated: bool) -> Tensor:
    from megatron.core import parallel_state as mpu

    part = short.removeprefix("mlp.shared_experts.")
    if part not in (FC1, FC2):
        return whole
    return _shard(part, whole, mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size(), gated)


def _shard(part: str, whole: Tensor, rank: int, size: int, gated: bool) -> Tensor:
    """Return a rank's shard: rows of fc1 (gate and up rows apart), columns of fc2, all of its bias."""
    if part == BIASES[1]:
        return whole
    if part == FC2:
        return weights.slice_columns(whole, rank, size).contiguous()
    return weights.slice_rows(whole, rank, size, gated=gated).contiguous()


def continue_if_done(args: Namespace) -> None:
    """Turn the flag off where an earlier start has upcycled already (a requeued job), and go on from --save.

    Raises:
        UserError: --save holds a checkpoint of another model.
    """
    if not args.moe_use_upcycling or args.save is None or not (Path(args.save) / TRACKER).is_file():
        return
    check_same_run(args)
    args.load, args.moe_use_upcycling = args.save, False
    if getattr(args, "rank", 0) == 0:
        print(f"[moe] {args.save} holds this run's checkpoint: going on from it, not upcycling again", flush=True)


def check_same_run(args: Namespace) -> None:
    """Raise UserError where the checkpoint in --save is not one of this MoE."""
    found = open_source(Path(args.save)).args
    wanted = {name: getattr(args, name, None) for name in ("num_experts", "num_layers", "hidden_size")}
    different = [f"{name} {getattr(found, name, None)}, not {value}" for name, value in wanted.items()
                 if getattr(found, name, None) != value]
    if different:
        raise UserError(
            "the folder for the upcycled checkpoint holds a checkpoint of another model",
            where=f"--save {args.save}",
            why="; ".join(different),
            remedy="give another --save",
        )
