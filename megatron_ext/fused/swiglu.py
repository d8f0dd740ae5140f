"""SwiGLU, with or without a weight a row, in one pass forward and one backward.

    out = silu(gate) * up * weight            y = [gate, up]

The experts multiply each row by its routing weight; a dense or shared FFN has none. Megatron gives the same formula to
torch.compile, whose weighted backward took three times as long as a copy of as many bytes (one H200, torch 2.11). Patch
gpu/swiglu asks `takes` and keeps upstream's function for all else: the CPU, fp64, FP8 storage, a tensor subclass.

Arithmetic is fp32 throughout and each result is rounded once, as in upstream's compiled function on a GPU. What is
kept for the backward is what upstream keeps: y and the weights.

Shapes: R rows, F columns of each half.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

KERNELS_VARIABLE = "MOE_EXT_SWIGLU_KERNELS"  # "torch" leaves all to upstream's compiled function
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def takes(y: Tensor, weights: Tensor | None = None) -> bool:
    """Whether `swiglu` can do this; where it cannot, upstream's function must.

    Args:
        y: What would be its input, any shape, dtype and device.
        weights: Likewise.
    """
    if not _kernels_run(y) or os.environ.get(KERNELS_VARIABLE, "triton") == "torch":
        return False
    if y.dim() != 2 or y.shape[1] % 2 or not _is_plain(y):
        return False
    return weights is None or (weights.shape == (y.shape[0], 1) and weights.device == y.device and _is_plain(weights))


def swiglu(y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return silu(y[:, :F]) * y[:, F:] * weights, differentiable once.

    Args:
        y: [R, 2F], fp32, fp16 or bf16, on the current GPU; any strides, fastest with the last dimension contiguous.
        weights: [R, 1], fp32, fp16 or bf16 (None: ones).

    Returns:
        [R, F] in the dtype of y. The gradients have the dtypes of y and of the weights.
    """
    out: Tensor = _SwiGLU.apply(y, weights)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None) -> Tensor:
        from megatron_ext.fused import swiglu_kernels

        ctx.save_for_backward(y, weights)
        return swiglu_kernels.forward(y, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        from megatron_ext.fused import swiglu_kernels

        y, weights = ctx.saved_tensors
        return swiglu_kernels.backward(grad, y, weights)


def _kernels_run(y: Tensor) -> bool:
    # Triton launches on the current device, whatever device the pointers are of.
    return y.is_cuda and y.device.index == torch.cuda.current_device() and _has_triton()


def _is_plain(tensor: Tensor) -> bool:
    # A subclass (a quantized or a distributed tensor) need not hold what its dtype says.
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype in DTYPES


@functools.cache
def _has_triton() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return hasattr(triton, "jit")
