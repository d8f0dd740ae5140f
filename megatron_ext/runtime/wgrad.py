"""The weight gradient of Megatron's own linear layers, summed in the same GEMM, through Transformer Engine.

Megatron fuses product and sum through an extension of Apex (`fused_weight_gradient_mlp_cuda`). Where Apex is absent,
patch gpu/te-wgrad puts this module in its place: it has that extension's two functions.

Shapes: T tokens, I inputs, O outputs of the layer.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata

import torch
from packaging.version import Version

# The oldest whose GEMM this was run with; before it the arguments were others.
_TRANSFORMER_ENGINE = Version("2.20")


def is_available() -> bool:
    """Return whether the sum can be fused here: Transformer Engine is new enough and there is a GPU.

    Under the CPU runtime, which hides Transformer Engine and answers for torch.cuda, there is none.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    try:
        installed = Version(metadata.version("transformer_engine"))
    except metadata.PackageNotFoundError:
        return False
    return installed >= _TRANSFORMER_ENGINE and torch.cuda.is_available()


def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add grad_output^T @ inputs to `main_grad`, in place.

    Args:
        inputs: [T, I], bf16, fp16 or fp32.
        grad_output: [T, O], the same type.
        main_grad: [O, I], fp32: the products are summed in fp32 and never rounded to bf16 on the way.
    """
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    # cuBLAS counts columns first, so A is the input: TE's NT layout is A^T's product as Megatron's linear needs it.
    general_gemm(
        inputs, grad_output, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True
    )


def wgrad_gemm_accum_fp16(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Do the same for a `main_grad` of bf16 or fp16."""
    wgrad_gemm_accum_fp32(inputs, grad_output, main_grad)
