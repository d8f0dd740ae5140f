"""Transformer Engine's own grouped product, which takes each expert's number of rows on the GPU.

With cuBLASLt 13.4 or newer, Transformer Engine computes a layer's experts on Hopper in one call that reads the counts
on the GPU (`use_grouped_tensor` of its GroupedLinear, transformer_engine/pytorch/module/grouped_linear.py). Megatron
gives it a list on the host, which that path refuses; patch gpu/te-native-products gives it the tensor instead, and then
the alltoall dispatcher on one rank waits for nothing (patch gpu/counts-on-device).
"""

from __future__ import annotations

from typing import Any

from megatron_ext.runtime import notes


def takes_counts_on_device(experts: Any) -> bool:
    """Return whether Megatron's `TEGroupedMLP` may hand its linear layers the counts as a tensor on the GPU.

    It may where both layers' products take Transformer Engine's grouped path: asked for by
    NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM=1, 16-bit numbers, a cuBLASLt that is new enough, and nothing in the
    configuration that needs the counts on the host (biases, FP8's padding, offloading).

    Args:
        experts: A `TEGroupedMLP` with its layers built; its `config` is Megatron's `TransformerConfig`.
    """
    if not all(getattr(linear, "use_grouped_tensor", False) for linear in (experts.linear_fc1, experts.linear_fc2)):
        return False
    from transformer_engine.pytorch.module import grouped_linear

    config = experts.config
    reasons = {
        "expert biases": config.add_bias_linear,
        "FP8 or FP4": config.fp8 or config.fp4,
        "activation offloading": config.fine_grained_activation_offloading or config.cpu_offloading,
        "cuBLASLt is older than 13.4": not grouped_linear.is_module_grouped_tensor_path_supported(
            None, config.params_dtype
        ),
    }
    obstacle = ", ".join(reason for reason, holds in reasons.items() if holds)
    if obstacle:
        notes.say_once(f"experts: not by Transformer Engine's native grouped product: {obstacle}")
    return not obstacle
