"""Megatron's local experts, computed together: the same parameters and checkpoint keys, a few launches a layer.

Megatron without Transformer Engine runs its experts one after the other (`SequentialMLP`): three kernels and a dozen
Python calls for each expert, and a wait for the GPU to learn how many rows each one has. Here a layer's experts are two
grouped matrix products (`grouped.py`) around Megatron's own activation, and the counts stay on the device.

Shapes: R rows in expert order, E local experts, H hidden size, F the experts' intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from megatron_ext.experts.grouped import grouped_linear
from megatron_ext.runtime import notes

# torch's kernel reads rows and weights in units of 16 bytes.
_ALIGNMENT = 16


class TorchGroupedMLP(SequentialMLP):
    """All local experts of a layer in grouped products; built, saved and loaded as `SequentialMLP`.

    What the products cannot do (`unsupported`) runs as in `SequentialMLP`, expert by expert, and is said once at start.
    """

    # The dispatchers read this (patch gpu/counts-on-device): `alltoall` on one rank then waits for nothing, ours
    # copy nothing back to the device.
    counts_on_device = True
    local_experts: nn.ModuleList

    def __init__(self, num_local_experts: int, config: Any, submodules: MLPSubmodules, **options: Any) -> None:
        """Build the experts as `SequentialMLP` does, from the same random states."""
        super().__init__(num_local_experts, config, submodules, **options)
        self.local_experts = LastRegisteredFirst(list(self.local_experts))
        between = MLPSubmodules(linear_fc1=PassOn, linear_fc2=PassOn, activation_func=submodules.activation_func)
        # An expert without its linear layers: Megatron's activation, whichever the configuration names.
        self.activation = MLP(
            self.config,
            between,
            is_expert=True,
            ffn_hidden_size=self.config.moe_ffn_hidden_size,
            tp_group=self.tp_group,
        )
        self.recomputes_activation = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )
        self.unsupported = _why_not(self)
        if self.unsupported:
            self.counts_on_device = False  # expert by expert, the host needs them
            notes.say_once(f"the experts run one after the other: {self.unsupported}")

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the experts' outputs times their weights [R, H], and no bias.

        Args:
            permuted_local_hidden_states: [R, H].
            tokens_per_expert: [E] on any device; its sum is R.
            permuted_probs: [R] mixing weights.
        """
        rows = permuted_local_hidden_states
        linears = _linears(self)
        if self.unsupported or _is_sharded(linears[0][0].weight) or _is_watched(linears):
            return cast("tuple[Tensor, Tensor | None]", super().forward(rows, tokens_per_expert, permuted_probs))
        _announce(linears)
        fuse = bool(self.config.gradient_accumulation_fusion)
        fc1, fc2 = ([pair[at].weight for pair in linears] for at in (0, 1))
        # From a pinned tensor of the dispatcher's, if at all: nothing waits.
        ends = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        inner = grouped_linear(rows, ends, fc1, add_to_main_grad=fuse)
        if not self.recomputes_activation:
            inner = self._activate(inner, permuted_probs)
            return grouped_linear(inner, ends, fc2, add_to_main_grad=fuse), None
        recompute = tensor_parallel.CheckpointWithoutOutput()
        inner = recompute.checkpoint(self._activate, inner, permuted_probs)
        output = grouped_linear(inner, ends, fc2, add_to_main_grad=fuse)
        recompute.discard_output_and_register_recompute(output)
        return output, None

    def _activate(self, inner: Tensor, probs: Tensor) -> Tensor:
        return cast(Tensor, self.activation(inner, probs)[0])


class LastRegisteredFirst(nn.ModuleList):
    """Experts by number as ever, with their parameters registered from the last expert to the first.

    Megatron's buffers hold parameters in the reverse of that order, so that the weights of a layer's experts lie there
    by ascending number, evenly spaced, and one view covers them. Keys do not change.
    """

    def __init__(self, experts: Sequence[nn.Module]) -> None:
        """Take the experts in their order."""
        super().__init__()
        for number in reversed(range(len(experts))):
            self.add_module(str(number), experts[number])

    def __iter__(self) -> Iterator[nn.Module]:
        """Go through the experts by ascending number."""
        return (self[number] for number in range(len(self)))


class PassOn(nn.Module):
    """Takes the place of a linear layer and returns its input."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        """Take what a linear layer takes."""
        super().__init__()

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return the input and no bias."""
        return hidden, None

    def backward_dw(self) -> None:
        """Nothing was put off."""


def _linears(experts: TorchGroupedMLP) -> list[tuple[Any, Any]]:
    return [(expert.linear_fc1, expert.linear_fc2) for expert in experts.local_experts]


def _why_not(experts: TorchGroupedMLP) -> str:
    """Return what these experts need that the grouped products lack; empty where they can run."""
    config = experts.config
    first = _linears(experts)[0]
    sizes = {size for linear in first for size in linear.weight.shape}
    width = _ALIGNMENT // first[0].weight.element_size()
    reasons = {
        "expert biases": config.add_bias_linear,
        "FP8 or FP4": config.fp8 or config.fp4,
        "--moe-apply-probs-on-input": config.moe_apply_probs_on_input,
        "--use-te-activation-func": config.use_te_activation_func,
        "sharded expert weights (GTP)": getattr(first[0], "gtp_remat_size", 1) > 1,
        f"sizes that are no multiple of {width}": any(size % width for size in sizes),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def _is_sharded(weight: Any) -> bool:
    # Megatron-FSDP gathers a weight when its own module runs, and ours do not.
    return hasattr(weight, "__fsdp_param__")


def _is_watched(linears: Sequence[tuple[nn.Module, nn.Module]]) -> bool:
    """Whether someone wants to see an expert's own layers at work (Megatron's activation dumps do)."""
    return any(linear._forward_hooks for pair in linears for linear in pair)


def _announce(linears: Sequence[tuple[nn.Module, nn.Module]]) -> None:
    """Call what waits for these layers to be used: DDP gathers parameters just in time (--overlap-param-gather)."""
    for pair in linears:
        for linear in pair:
            for hook in linear._forward_pre_hooks.values():
                hook(linear, ())
