"""The gradients of the router's product, logits = X @ W^T, without fp32 copies of X and of its gradient.

X and W are bf16, the logits and their gradient G fp32. Upstream turns X and W into fp32, lets Transformer Engine
multiply them in TF32, which keeps 11 bits of G, and rounds an fp32 gradient of X's size to bf16. But X and W are exact
in bf16 already; only G is wider. Here G is written as two bf16 halves, which together keep at least 16 bits of it:

    high = bf16(G)                 low = bf16(G - high)                |G - high - low| <= 2^-17 |G|
    dX = [high, low] @ [W; W]      one bf16 product, summed in fp32 and rounded once
    dW = high^T @ X + low^T @ X    one bf16 product with fp32 sums, the two halves added in fp32, rounded once

Patch gpu/router-gradient asks `takes` and keeps upstream's products for all else: the CPU, a router dtype other than
fp32, X or W in a dtype other than bf16, a tensor subclass, no rows.

A gradient of inf comes out as nan (inf - inf in the low half), and nan as nan: Megatron's check of the gradients sees
both. So does a finite one above bf16's largest number (3.39e38), whose high half is inf.

Shapes: T tokens, H hidden, E experts.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

VARIABLE = "MOE_EXT_ROUTER_GRADIENT"  # "megatron" leaves all to upstream's products


def takes(tokens: Tensor, weight: Tensor, grad: Tensor) -> bool:
    """Whether `gradients` can do this; where it cannot, upstream's products must.

    Args:
        tokens: X as it would be given, any shape, dtype and device.
        weight: W, likewise.
        grad: G, likewise.
    """
    if os.environ.get(VARIABLE, "bf16") == "megatron" or not _products_run(tokens):
        return False
    if not (tokens.dim() == weight.dim() == grad.dim() == 2 and tokens.shape[0] > 0):
        return False
    # A subclass (a quantized or a distributed tensor) need not hold what its dtype says.
    if not all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in (tokens, weight, grad)):
        return False
    return tokens.dtype == weight.dtype == torch.bfloat16 and grad.dtype == torch.float32


def gradients(tokens: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the tokens and of the weight.

    Args:
        tokens: [T, H], bf16, T > 0.
        weight: [E, H], bf16, on the same device.
        grad: [T, E], fp32, the logits' gradient; any strides.

    Returns:
        [T, H] and [E, H], bf16.
    """
    halves = split(grad)
    of_halves = _product(halves.t(), tokens, torch.float32)
    high, low = of_halves.chunk(2)
    return _product(halves, torch.cat((weight, weight)), torch.bfloat16), (high + low).to(torch.bfloat16)


def split(grad: Tensor) -> Tensor:
    """Return [high, low], [T, 2E] in bf16, of an fp32 tensor of [T, E]."""
    rows, experts = grad.shape
    halves = grad.new_empty(rows, 2 * experts, dtype=torch.bfloat16)
    high, low = halves.chunk(2, dim=1)
    high.copy_(grad)
    # What bf16's rounding leaves is an fp32 number, so the difference is exact; storing it rounds it.
    torch.sub(grad, high, out=low)
    return halves


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b of two bf16 matrices, summed in fp32, in the dtype given."""
    if a.device.type != "cuda":
        # torch has the product with another output dtype for CUDA alone; bf16's values and products are exact in fp32.
        return torch.mm(a.float(), b.float()).to(dtype)
    return torch.mm(a, b, out_dtype=dtype)


def _products_run(tokens: Tensor) -> bool:
    return tokens.is_cuda and _has_wide_product()


@functools.cache
def _has_wide_product() -> bool:
    # torch 2.8 brought it, for NVIDIA's library alone.
    return torch.version.cuda is not None and "dtype" in torch.ops.aten.mm.overloads()
