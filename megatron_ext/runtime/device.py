"""Which device a training start gets, the flags that follow from it, and what the CPU refuses by name."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ext.errors import UserError

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class DeviceChoice:
    """The device that training runs on and the reason why, printed at start."""

    device: Device
    reason: str


@dataclass(frozen=True)
class AddedFlag:
    """A Megatron flag that we add because nobody gave it, and why."""

    words: tuple[str, ...]
    reason: str


def choose_device(asked: str, *, gpus: int, probe_error: str = "") -> DeviceChoice:
    """Return the device for `--device asked`; never the CPU where a GPU was asked for.

    Args:
        asked: `auto`, `cuda` or `cpu`.
        gpus: Number of CUDA devices that torch sees.
        probe_error: What torch said when it looked, for the error text.

    Raises:
        UserError: A GPU was asked for and there is none.
    """
    if asked == "cpu":
        return DeviceChoice("cpu", "--device cpu")
    if gpus:
        return DeviceChoice("cuda", f"{gpus} CUDA device{'s' if gpus > 1 else ''} found")
    if asked == "cuda":
        raise UserError(
            "a GPU was asked for and this machine has none that torch can use",
            where="--device cuda",
            why=probe_error or "torch.cuda.device_count() is 0",
            remedy="check `nvidia-smi` and CUDA_VISIBLE_DEVICES; to train a toy without a GPU pass --device cpu",
        )
    return DeviceChoice("cpu", "no CUDA device found")


# Fusions of Apex or Transformer Engine that are on by default and have no CPU form.
_CPU_FLAGS = (
    AddedFlag(("--distributed-backend", "gloo"), "NCCL needs GPUs"),
    AddedFlag(("--transformer-impl", "local"), "Transformer Engine needs a GPU"),
    AddedFlag(("--no-masked-softmax-fusion",), "a CUDA kernel"),
    AddedFlag(("--no-bias-gelu-fusion",), "a compiled kernel"),
    AddedFlag(("--no-bias-swiglu-fusion",), "a compiled kernel"),
    AddedFlag(("--no-bias-dropout-fusion",), "a compiled kernel"),
    AddedFlag(("--no-rope-fusion",), "a kernel of Transformer Engine or Apex"),
    AddedFlag(("--no-persist-layer-norm",), "a kernel of Apex"),
)


def flags_for(device: Device, given: Sequence[str]) -> list[AddedFlag]:
    """Return the flags to add for a device, leaving out those the user gave a value for."""
    present = {word.split("=", 1)[0] for word in given}
    if device == "cpu":
        return [flag for flag in _CPU_FLAGS if flag.words[0] not in present]
    if not has_transformer_engine() and "--transformer-impl" not in present:
        return [AddedFlag(("--transformer-impl", "local"), "Transformer Engine is not installed: slower")]
    return []


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine can be found, without importing it."""
    return importlib.util.find_spec("transformer_engine") is not None


@dataclass(frozen=True)
class _Refusal:
    flag: str
    asked_for: bool
    why: str
    remedy: str


def refuse_on_cpu(args: Namespace) -> None:
    """Stop a start that asks the CPU for what it cannot run.

    Args:
        args: Megatron's parsed arguments, before its own validation.

    Raises:
        UserError: Names the flag, the reason and the remedy. The first one met.
    """
    gpu = "run on a GPU (--device cuda), or"
    refusals = (
        _Refusal(
            "--transformer-impl transformer_engine",
            args.transformer_impl == "transformer_engine",
            "Transformer Engine's kernels run on GPUs only",
            f"{gpu} leave the flag out: the CPU uses Megatron's local layers",
        ),
        _Refusal("--fp8-format", bool(args.fp8), "FP8 is Transformer Engine's", f"{gpu} train in fp32 or --bf16"),
        _Refusal(
            "--fp4-format", bool(getattr(args, "fp4", None)), "FP4 is Transformer Engine's", f"{gpu} use --bf16"
        ),
        _Refusal(
            "--cuda-graph-impl",
            args.cuda_graph_impl not in (None, "none"),
            "there are no CUDA graphs without CUDA",
            f"{gpu} leave the flag out",
        ),
        _Refusal(
            "--moe-flex-dispatcher-backend",
            args.moe_token_dispatcher_type == "flex"
            and args.moe_flex_dispatcher_backend in ("deepep", "hybridep", "ncclep"),
            f"{args.moe_flex_dispatcher_backend} moves tokens with GPU kernels",
            f"{gpu} use --moe-token-dispatcher-type alltoall",
        ),
        _Refusal(
            "--moe-grouped-gemm",
            args.moe_grouped_gemm,
            "Megatron's grouped experts are Transformer Engine's",
            f"{gpu} leave the flag out; --moe-ext-experts torch groups them here",
        ),
        _Refusal(
            "--moe-permute-fusion",
            bool(args.moe_permute_fusion),
            "the fused permutation is a Triton kernel of Transformer Engine",
            f"{gpu} leave the flag out",
        ),
        _Refusal(
            "--moe-router-fusion",
            bool(args.moe_router_fusion),
            "the fused router is a kernel of Transformer Engine",
            f"{gpu} leave the flag out",
        ),
        _Refusal(
            "--profile",
            args.profile and not args.use_pytorch_profiler,
            "without --use-pytorch-profiler it drives NVIDIA's Nsight Systems",
            "add --use-pytorch-profiler, which records the CPU too (docs/trace.md)",
        ),
        _Refusal(
            "--sequence-parallel",
            args.sequence_parallel,
            "the norm of Megatron's local layers does not support it without Apex",
            f"{gpu} leave the flag out",
        ),
    )
    for refusal in refusals:
        if refusal.asked_for:
            raise UserError(
                "the CPU runtime cannot run this", where=refusal.flag, why=refusal.why, remedy=refusal.remedy
            )


def refuse_without_te(args: Namespace) -> None:
    """Stop a GPU start that asks for Transformer Engine where it is not installed.

    Raises:
        UserError: With the two ways out.
    """
    if args.transformer_impl == "transformer_engine" and not has_transformer_engine():
        raise UserError(
            "Transformer Engine was asked for and is not installed",
            where="--transformer-impl transformer_engine",
            remedy="install transformer-engine, or pass --transformer-impl local (slower)",
        )
