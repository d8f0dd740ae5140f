"""Which experts a run builds: Megatron's, or torch's grouped products over the same parameters."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.experts import order
from megatron_ext.runtime import cpu, notes

CHOICES = ("auto", "torch", "megatron")
VARIABLE = "MOE_EXT_EXPERTS"

_chosen: str | None = None


def add_arguments(parser: ArgumentParser) -> None:
    """Add `--moe-ext-experts`."""
    group = parser.add_argument_group("experts of this distribution")
    group.add_argument(
        "--moe-ext-experts",
        choices=CHOICES,
        default="auto",
        help="torch: all experts of a layer in grouped products of torch's, without Transformer Engine; megatron: "
        "Megatron's own; auto: torch on a GPU with --transformer-impl local, where it can do the job "
        "(default: %(default)s)",
    )


def configure(args: Namespace) -> None:
    """Choose, before the model is built, and say so; `args.moe_ext_experts` becomes `torch` or `megatron`.

    Raises:
        UserError: `torch` was asked for and cannot be had.
    """
    asked = args.moe_ext_experts or "auto"
    saved = order.saved_order(args) if args.num_experts else ""
    wanted = bool(args.num_experts) and (asked == "torch" or (asked == "auto" and _is_default(args, saved)))
    obstacle = _obstacle(args) if wanted else ""
    if obstacle and asked == "torch":
        raise UserError(
            "torch's grouped experts cannot run this",
            where="--moe-ext-experts torch",
            why=obstacle,
            remedy="leave the flag out, or change what stands in the way",
        )
    _settle(args, "torch" if wanted and not obstacle else "megatron", saved)
    if _chosen == "torch":
        notes.say_once(f"experts: torch's grouped products, all experts of a layer at once (--moe-ext-experts {asked})")
    elif obstacle:
        notes.say_once(f"experts: Megatron's, one after the other: {obstacle}")
    elif asked == "auto" and saved == "local" and _is_default(args, ""):
        notes.say_once("experts: Megatron's, one after the other: the checkpoint's optimizer state is in their order")


def _is_default(args: Namespace, saved: str) -> bool:
    """Return what `auto` means, where nothing stands in the way."""
    if saved:
        return saved == "torch"
    # On the CPU they gain with toys only (benchmarks/torch_experts.py).
    return args.transformer_impl == "local" and not cpu.is_installed()


def settle(args: Namespace) -> None:
    """Do `configure`'s part under a stock entry script, where the environment chooses, once the model is built.

    Raises:
        UserError: The optimizer state to be loaded is for other experts.
    """
    if _chosen is None:
        _settle(args, _from_environment(), order.saved_order(args))


def _settle(args: Namespace, experts: str, saved: str) -> None:
    global _chosen
    if saved and saved != order.order_of(args, experts):
        raise UserError(
            "the optimizer state of the checkpoint would go to the wrong experts",
            where=f"--load {args.load}",
            why=f"it goes by place, in the order of {order.NAMES[saved]}; this run's is another",
            remedy="go on with those experts and save once with --dist-ckpt-optim-fully-reshardable, "
            "or pass --no-load-optim",
        )
    _chosen = args.moe_ext_experts = experts


def builder(upstream: Any) -> Any:
    """Return what builds a layer's experts: `upstream` as given, or ours (patch gpu/torch-experts calls this)."""
    if (_chosen or _from_environment()) != "torch":
        return upstream
    # Here: Megatron imports the caller while it imports itself.
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    from megatron_ext.experts.module import TorchGroupedMLP

    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return partial(TorchGroupedMLP, submodules=linears)


def _from_environment() -> str:
    return "torch" if os.environ.get(VARIABLE) == "torch" else "megatron"


def _obstacle(args: Namespace) -> str:
    """Return why these experts cannot be used in this run, empty where they can."""
    reasons = {
        "FP8 and FP4 are Transformer Engine's": args.fp8 or getattr(args, "fp4", None),
        "--use-te-activation-func is Transformer Engine's": getattr(args, "use_te_activation_func", False),
        "--use-kitchen brings its own layers": getattr(args, "use_kitchen", False),
        "--transformer-impl inference_optimized brings its own experts": args.transformer_impl == "inference_optimized",
        "experts with biases (pass --disable-bias-linear)": args.add_bias_linear,
        "--moe-apply-probs-on-input": args.moe_apply_probs_on_input,
        "FSDP gathers each expert's own weights": getattr(args, "use_megatron_fsdp", False)
        or getattr(args, "use_torch_fsdp2", False),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)
