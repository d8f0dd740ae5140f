"""Megatron's two SwiGLU entry points with our kernels in them, on the device named: `cuda`, or `cpu` interpreted.

    python megatron_check.py DEVICE

On the CPU two things are replaced: the question whether the tensor lies on a GPU, and the C++ helper of upstream's
recomputation, which torch compiles with ninja when it is first used. Exits 1 with what went wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from megatron_ext.runtime import cpu

DEVICE = sys.argv[1]
if DEVICE == "cpu":
    cpu.install()  # before Megatron

from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.fusions import fused_bias_swiglu as megatron_swiglu  # noqa: E402
from megatron.core.tensor_parallel import random as megatron_random  # noqa: E402

from megatron_ext.fused import swiglu, swiglu_kernels  # noqa: E402

launched: list[str] = []


def count_launches() -> None:
    """Note each call of a kernel, and run it."""
    for name in ("forward", "backward"):
        real = getattr(swiglu_kernels, name)

        def counted(*args: object, name: str = name, real: Callable = real) -> object:
            launched.append(name)
            return real(*args)

        setattr(swiglu_kernels, name, counted)


def launches(run: Callable[[], torch.Tensor]) -> list[str]:
    """The kernels that a call and its backward launch."""
    launched.clear()
    run().float().square().sum().backward()
    return list(launched)


def fill_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Give an output whose memory was freed its values again, in its own storage; the C++ helper swaps the pointer."""
    output.untyped_storage().resize_(recomputed.untyped_storage().nbytes())
    output.untyped_storage().copy_(recomputed.untyped_storage())


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 2 x 24 values in bf16 and their fp32 weights, as the experts get them."""
    made = torch.Generator().manual_seed(1)
    y = torch.randn(10, 48, generator=made).to(DEVICE, torch.bfloat16)
    return y.requires_grad_(), torch.rand(10, 1, generator=made).to(DEVICE).requires_grad_()


def check_calls() -> None:
    """The kernels run where they can, for rows in two and three dimensions, and nowhere else."""
    y, weights = inputs()
    both = ["forward", "backward"]
    weighted, plain = megatron_swiglu.weighted_bias_swiglu_impl, megatron_swiglu.bias_swiglu_impl
    assert launches(lambda: weighted(y, None, weights)) == both, "upstream's function ran"
    assert launches(lambda: weighted(y.view(5, 2, 48), None, weights)) == both, "upstream's function ran"
    assert launches(lambda: plain(y, None)) == both, "upstream's function ran"
    assert plain(y.view(5, 2, 48), None).shape == (5, 2, 24)
    bias = torch.zeros(48, device=DEVICE, dtype=torch.bfloat16)
    assert launches(lambda: plain(y, bias)) == [], "a bias reached the kernels"
    assert launches(lambda: plain(y, None, False, True)) == [], "offloading reached the kernels"
    assert launches(lambda: plain(y, None, True)) == [], "FP8 storage reached the kernels"
    assert launches(lambda: weighted(y, None, weights, True)) == [], "FP8 storage reached the kernels"
    assert launches(lambda: weighted(y.double(), None, weights)) == [], "fp64 reached the kernels"


def check_recompute() -> None:
    """Recomputing the activation (moe_act) gives the gradients of not recomputing it, bit for bit."""
    results = []
    for recompute in (False, True):
        y, weights = inputs()
        matrix = torch.linspace(-1, 1, 24 * 8, device=DEVICE).view(24, 8).bfloat16().requires_grad_()

        def activation(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return megatron_swiglu.weighted_bias_swiglu_impl(y, None, weights)

        launched.clear()
        if recompute:
            checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None)  # else it asks for TE
            out = checkpoint.checkpoint(activation, y, weights) @ matrix
            checkpoint.discard_output_and_register_recompute(out)
        else:
            out = activation(y, weights) @ matrix
        out.float().square().sum().backward()
        assert launched.count("forward") == 1 + recompute, launched
        results.append((out, y.grad, weights.grad, matrix.grad))
    for kept, recomputed in zip(*results, strict=True):
        assert torch.equal(kept, recomputed)


def main() -> int:
    """Run the checks."""
    if DEVICE == "cpu":
        swiglu._kernels_run = lambda y: True
        megatron_random._get_share_storage = lambda: fill_storage
    count_launches()
    check_calls()
    check_recompute()
    print(f"Megatron calls the kernels on {DEVICE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
