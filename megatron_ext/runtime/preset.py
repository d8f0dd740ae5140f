"""Presets: named tables of flags, each with its reason, applied only where the user gave no value.

`--moe-ext-preset hopper` is what was fastest on one H200 without a change of the mathematics (docs/gpu.md has the
reasons, docs/measurements.md the figures). `hopper-fp8` is the same in 8 bits. Recomputation is left to the user: the
preset frees memory, so that a run that needed full recomputation may need none.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from megatron_ext.errors import UserError
from megatron_ext.runtime.device import AddedFlag, Device


@dataclass(frozen=True)
class PresetFlag:
    """A flag of a preset.

    Args:
        words: The flag and its value.
        reason: Why, with what it is worth where that was measured.
        needs: Apply it only where the user gave this flag, with this value if one stands here (empty: always).
        unless: Leave it out where the user gave one of these (each a flag, with its value if two words).
    """

    words: tuple[str, ...]
    reason: str
    needs: tuple[str, ...] = ()
    unless: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class PresetVariable:
    """An environment variable of a preset, set where it is not set yet."""

    name: str
    value: str
    reason: str
    # Megatron's tensor and context parallelism order their kernels by another value of the first one.
    unless_above_one: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preset:
    """Flags and environment variables that belong together."""

    flags: tuple[PresetFlag, ...]
    variables: tuple[PresetVariable, ...] = ()


_HOPPER = (
    PresetFlag(
        ("--moe-permute-fusion",),
        "one kernel sorts the tokens by expert, not a chain of small ones",
        needs=("--num-experts",),
    ),
    PresetFlag(("--moe-router-fusion",), "top-k, scores and aux loss in one kernel", needs=("--num-experts",)),
    PresetFlag(("--cross-entropy-loss-fusion",), "the loss in one pass over the logits"),
    PresetFlag(
        ("--cross-entropy-fusion-impl", "te"),
        "Transformer Engine's loss kernel, which makes the gradient in the logits' place: 5 times faster "
        "and 20 GiB less at 16k tokens",
    ),
    PresetFlag(
        ("--fused-residual-rmsnorm",),
        "the norm's backward adds the residual itself",
        needs=("--normalization", "RMSNorm"),
    ),
    PresetFlag(
        ("--no-create-attention-mask-in-dataloader",),
        "the attention kernel is causal by itself; a mask is 134 MB a micro-batch of 8 at 4,096 tokens, made "
        "and copied each time",
        unless=(("--reset-attention-mask",), ("--transformer-impl", "local")),
    ),
    PresetFlag(
        ("--moe-ext-loss-check", "step"),
        "NaN protection with one wait for the GPU a step, not two a micro-batch",
    ),
    PresetFlag(
        ("--moe-ext-adam", "fused"),
        "gradient clip, AdamW and the copy to the 16-bit weights read and write each value once: 51 ms for three "
        "passes, a copy of the bytes takes 27 (3.8 billion parameters on one card)",
        needs=("--use-distributed-optimizer",),
    ),
)
_HOPPER_VARIABLES = (
    PresetVariable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "8",
        "streams don't wait for each other",
        ("--tensor-model-parallel-size", "--context-parallel-size"),
    ),
    PresetVariable("NVTE_USE_CUTLASS_GROUPED_GEMM", "1", "one launch for all experts of a layer"),
)
# Not with FP8: Megatron then pads the experts' rows by counts on the host, which this path refuses.
_NATIVE = PresetVariable(
    "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM",
    "1",
    "the experts' products in one call each that reads the row counts on the GPU, where cuBLASLt is 13.4 or newer: no "
    "wait for the GPU in an MoE layer on one rank",
)
_FP8 = (
    PresetFlag(("--fp8-format", "e4m3"), "products of 8-bit numbers; weights, gradients and optimizer as with bf16"),
    PresetFlag(
        ("--fp8-recipe", "blockwise"),
        "a scale for each 128 values, so that no outlier costs the rest of a tensor its precision",
    ),
)
PRESETS = {
    "hopper": Preset(_HOPPER, (*_HOPPER_VARIABLES, _NATIVE)),
    "hopper-fp8": Preset((*_HOPPER, *_FP8), _HOPPER_VARIABLES),
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of this module to Megatron's parser."""
    group = parser.add_argument_group("moe-ext preset")
    group.add_argument(
        "--moe-ext-preset",
        choices=sorted(PRESETS),
        default=None,
        help="fast settings for a kind of GPU; printed at start, never over a flag that was given (default: none)",
    )
    group.add_argument(
        "--moe-ext-loss-check",
        choices=("micro-batch", "step"),
        default="micro-batch",
        help="how often the loss is checked for NaN and infinity: after each micro-batch, or once a step over all of "
        "them, before the optimizer (default: %(default)s)",
    )


def chosen(given: Sequence[str]) -> str | None:
    """Return the preset's name among the words of a command line, before they are parsed."""
    found = None  # the last one counts, as in argparse
    for index, word in enumerate(given):
        name, equals, value = word.partition("=")
        if name == "--moe-ext-preset":
            found = value if equals else given[index + 1] if index + 1 < len(given) else None
    return found


def flags_for(name: str | None, device: Device, given: Sequence[str]) -> list[AddedFlag]:
    """Return the flags that a preset adds to those given.

    Raises:
        UserError: The preset is for GPUs and this is the CPU.
    """
    if name not in PRESETS:
        return []  # Megatron's parser names the choices
    if device == "cpu":
        raise UserError(
            "this preset is for GPUs",
            where=f"--moe-ext-preset {name}",
            why="its fusions are GPU kernels",
            remedy="leave the flag out on the CPU, or run on a GPU (--device cuda)",
        )
    return [
        AddedFlag(flag.words, f"{flag.reason} (preset {name})")
        for flag in PRESETS[name].flags
        if not _gives(given, flag.words[:1])
        and _gives(given, flag.needs)
        and not any(_gives(given, other) for other in flag.unless)
    ]


def set_environment(
    name: str | None, given: Sequence[str], environment: MutableMapping[str, str] | None = None
) -> list[AddedFlag]:
    """Set a preset's variables that are not set yet, before CUDA starts; return them for the start's report."""
    if name not in PRESETS:
        return []
    environment = os.environ if environment is None else environment
    added = []
    for variable in PRESETS[name].variables:
        if variable.name in environment or any(_size(flag, given) > 1 for flag in variable.unless_above_one):
            continue
        environment[variable.name] = variable.value
        added.append(AddedFlag((f"{variable.name}={variable.value}",), f"{variable.reason} (preset {name})"))
    return added


def _split(given: Sequence[str]) -> list[str]:
    return [part for word in given for part in (word.split("=", 1) if word.startswith("--") else (word,))]


def _gives(given: Sequence[str], wanted: Sequence[str]) -> bool:
    words = _split(given)
    return any(words[at : at + len(wanted)] == list(wanted) for at in range(len(words) + 1))


def _size(flag: str, given: Sequence[str]) -> int:
    words = _split(given)
    value = words[words.index(flag) + 1] if flag in words[:-1] else "1"
    return int(value) if value.isdigit() else 1
