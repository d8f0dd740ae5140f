"""Compare the AdamW kernel with fp64 and with torch's, on the device named: `cuda`, or `cpu` interpreted.

    python adam_check.py DEVICE [FIRST LAST]      (seeds)

Each case takes 20 steps with tensors of odd sizes, at odd places of their buffers, under changing learning rates and
clip coefficients. After each step every value must be nearer to fp64's than fp32 arithmetic allows for, and over all
steps no further than torch's fp32 AdamW is. Exits 1 with the first that is not.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.fused import adam_kernels
from megatron_ext.fused.adam_kernels import Addresses, Hyper, Tile

STEPS = 20
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}
SIZES = [0, 1, 3, 5, 127, 128, 129, 512, 513, 1000, 1024, 2048, 2500]


@dataclass
class Slot:
    """One parameter: fp32 tensors of [n] and the copy, [n] in another dtype."""

    p: Tensor
    m: Tensor
    v: Tensor
    grad: Tensor
    out: Tensor

    def row(self) -> tuple[int, int, int, int, int]:
        return tuple(t.data_ptr() for t in (self.p, self.m, self.v, self.grad, self.out))  # type: ignore[return-value]


def within(numel: int, dtype: torch.dtype, device: str, draw: random.Random) -> Tensor:
    """A tensor of [numel] somewhere in a larger buffer of 7s."""
    start = draw.choice([0, 0, 0, 1, 4, 7])
    return torch.full((numel + 16,), 7.0, dtype=dtype, device=device)[start : start + numel]


def untouched(tensor: Tensor) -> bool:
    """Whether all 7s around it still stand."""
    whole = tensor.new_empty(0).set_(tensor.untyped_storage())
    start = tensor.storage_offset()
    return bool((whole[:start] == 7).all()) and bool((whole[start + tensor.numel() :] == 7).all())


def slots(draw: random.Random, made: torch.Generator, out_dtype: torch.dtype, device: str) -> list[Slot]:
    """Some parameters, their moments as after some steps."""
    found = []
    for _ in range(draw.randint(1, 5)):
        numel = draw.choice(SIZES)
        dtypes = [torch.float32] * 4 + [out_dtype]
        slot = Slot(*(within(numel, dtype, device, draw) for dtype in dtypes))
        slot.p.copy_(torch.randn(numel, generator=made))
        slot.m.zero_()
        slot.v.zero_()
        found.append(slot)
    return found


def clipped(grad: Tensor, clip: Tensor) -> Tensor:
    """What upstream's clip leaves in the gradient: fp32, rounded once."""
    return grad * clip


def exact_step(p: Tensor, m: Tensor, v: Tensor, g: Tensor, hyper: Hyper) -> None:
    """AdamW in fp64, in place."""
    m.mul_(hyper.beta1).add_(g, alpha=1 - hyper.beta1)
    v.mul_(hyper.beta2).add_(g * g, alpha=1 - hyper.beta2)
    first, second = 1 - hyper.beta1**hyper.step, 1 - hyper.beta2**hyper.step
    step = (m / first) / ((v / second).sqrt() + hyper.eps)
    p.sub_(hyper.lr * (step + hyper.weight_decay * p))


def check(seed: int, device: str) -> None:
    """One random case."""
    draw, made = random.Random(seed), torch.Generator().manual_seed(seed)
    out_dtype = draw.choice(adam_kernels.DTYPES)
    tile = Tile(draw.choice([1, 2, 4]) * 512, 4) if draw.random() < 0.7 else adam_kernels.TILE
    beta1, beta2, eps = draw.choice([0.9, 0.8]), draw.choice([0.95, 0.999]), draw.choice([1e-8, 1e-5])
    decay = draw.choice([0.0, 0.1])
    tensors = slots(draw, made, out_dtype, device)
    case = f"seed {seed}: {[slot.p.numel() for slot in tensors]} {out_dtype}, {tile}"
    launch = Addresses([slot.p.numel() for slot in tensors], out_dtype, torch.device(device), tile)

    exact = [[t.double().clone() for t in (slot.p, slot.m, slot.v)] for slot in tensors]
    theirs = [torch.nn.Parameter(slot.p.clone()) for slot in tensors]
    torch_adam = torch.optim.AdamW(theirs, lr=1.0, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    moved = 0.0  # the sum of all learning rates: what fp32 can lose is a share of it
    for step in range(1, STEPS + 1):
        lr = draw.choice([1e-3, 1e-2, 3e-4])
        moved += lr
        clip = torch.tensor([draw.choice([1.0, 0.37, 1e-3])], device=device)
        hyper = Hyper(lr, beta1, beta2, eps, decay, step)
        torch_adam.param_groups[0]["lr"] = lr
        for slot, parameter in zip(tensors, theirs, strict=True):
            scale = draw.choice([0.0, 1.0, 1.0, 1e-4, 30.0])
            slot.grad.copy_(scale * torch.randn(slot.grad.numel(), generator=made))
            parameter.grad = clipped(slot.grad, clip)
        before = [slot.grad.clone() for slot in tensors]
        if step == 1:
            launch.point([slot.row() for slot in tensors])
        launch.adamw(hyper, clip)
        torch_adam.step()
        for slot, (p, m, v), grad, parameter in zip(tensors, exact, before, theirs, strict=True):
            assert torch.equal(slot.grad, grad), f"the gradient changed, {case}"
            g = clipped(grad, clip).double()
            exact_step(p, m, v, g, hyper)
            # Three roundings a step of p (torch rounds a factor close to one), and a few of a step's size, which
            # is up to 1 / sqrt(1 - beta2) learning rates.
            way = moved / (1 - beta2) ** 0.5
            allowed = UNIT[torch.float32] * (3 * step * (p.abs() + way) + 16 * way)
            for name, got in (("ours", slot.p), ("torch's", parameter.detach())):
                off = (got.double() - p).abs()
                assert bool((off <= allowed).all()), f"{name} is off by {off.max():.2e} at step {step}, {case}"
            rounded = 2 if device == "cpu" and out_dtype == torch.bfloat16 else 1  # its interpreter cuts
            off = (slot.out.double() - slot.p.double()).abs()
            limit = rounded * UNIT[out_dtype] * slot.p.double().abs() + SMALLEST[out_dtype]
            assert bool((off <= limit).all()), f"the copy is off, {case}"
            if rounded == 1:
                assert torch.equal(slot.out, slot.p.to(out_dtype)), f"the copy is not the rounded parameter, {case}"
    errors = [
        sum(float((got.double() - p).square().sum()) for got, (p, _, _) in zip(values, exact, strict=True)) ** 0.5
        for values in ([slot.p for slot in tensors], [parameter.detach() for parameter in theirs])
    ]
    # A handful of values may be lucky in torch's order of operations.
    many = sum(slot.p.numel() for slot in tensors) >= 1000
    assert errors[0] <= (1.05 if many else 4) * errors[1] + 2.0**-23, (
        f"errors: ours {errors[0]:.3e}, torch's {errors[1]:.3e}, {case}"
    )
    for slot, (_, m, v) in zip(tensors, exact, strict=True):
        for name, got, want in (("m", slot.m, m), ("v", slot.v, v)):
            worst = 64 * UNIT[torch.float32] * float(want.abs().max()) if want.numel() else 0.0
            assert bool(((got.double() - want).abs() <= worst + 1e-37).all()), f"{name} is off, {case}"
        assert all(untouched(t) for t in (slot.p, slot.m, slot.v, slot.grad, slot.out)), f"wrote beside, {case}"


def main() -> int:
    """Run the cases."""
    device = sys.argv[1]
    first, last = (int(word) for word in sys.argv[2:4]) if len(sys.argv) > 2 else (0, 12 if device == "cpu" else 60)
    for seed in range(first, last):
        check(seed, device)
    print(f"{last - first} cases of {STEPS} steps within fp32 rounding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
