"""Proof of recompute-residual: a norm that hands its input through as the residual keeps it when it is recomputed.

Transformer Engine's fused norm, which does so on a GPU, is played by two lines of torch: the outputs, and that one of
them is the argument itself, are all that recompute sees of it.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel import random

pytestmark = pytest.mark.usefixtures("world")


def _norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * x.square().mean(-1, keepdim=True).add(1e-5).rsqrt(), x


def _layer(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer's norm and product: what is left of the norm's output, the residual, the product."""
    checkpoint = random.CheckpointWithoutOutput()
    normed, residual = checkpoint.checkpoint(_norm, hidden)
    product = normed @ weight
    checkpoint.discard_output_and_register_recompute(product)
    return normed, residual, product


def test_the_residual_is_there_after_the_release_and_all_gradients_are_right() -> None:
    made = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, 6, generator=made, requires_grad=True) for n in (5, 6))
    # The layer's input is a result of another, as between two layers.
    normed, residual, product = _layer(x * 2, w)
    # Compared as numbers, here: pytest prints a function's tensors, and these may have no memory.
    released, kept = normed.untyped_storage().nbytes(), residual.untyped_storage().nbytes()
    assert (released, kept) == (0, 4 * 5 * 6)
    out = product + residual
    out.square().sum().backward()

    plain_x, plain_w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    plain_normed, plain_residual = _norm(plain_x * 2)
    plain = plain_normed @ plain_w + plain_residual
    plain.square().sum().backward()
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(x.grad, plain_x.grad)
    torch.testing.assert_close(w.grad, plain_w.grad)
