"""Compare the SwiGLU kernels with fp64 over random shapes, on the device named: `cuda`, or `cpu` interpreted.

    python swiglu_check.py DEVICE [FIRST LAST]      (seeds)

Every value must lie within one rounding of the exact one, plus what fp32 arithmetic may lose on the way. Prints how
many cases did; exits 1 with the first that does not.
"""

from __future__ import annotations

import random
import sys

import torch

from megatron_ext.fused import swiglu, swiglu_kernels

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}
# fp32 operations on the way, each worth a few units in the last place on a GPU (its exp and division are approximate).
STEPS = 24 * 2.0**-24


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in other strides."""
    if layout == "wide":
        return torch.nn.functional.pad(values, (3, 5))[:, 3 : 3 + values.shape[1]]
    if layout == "transposed":
        return values.t().contiguous().t()
    return values


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor, case: str) -> None:
    """|got - want| within one rounding of `want`, plus fp32's share of `scale`, the size of the terms."""
    # Triton's interpreter cuts a value to bf16 where the GPU rounds it: two units there.
    roundings = 2 if got.device.type == "cpu" and got.dtype == torch.bfloat16 else 1
    allowed = roundings * UNIT[got.dtype] * want.abs() + STEPS * scale + SMALLEST[got.dtype]
    over = (got.double() - want).abs() / allowed
    assert got.shape == want.shape, f"{name} has shape {tuple(got.shape)}, {case}"
    assert bool((over <= 1).all()), f"{name} is off by {over.max():.2f} of the allowed error, {case}"


def check(seed: int, device: str) -> None:
    """One random case: through autograd with the tiles in use, and the kernels by themselves with a random tile."""
    draw = random.Random(seed)
    made = torch.Generator().manual_seed(seed)
    rows, columns = draw.choice([0, 1, 2, 5, 33]), draw.choice([1, 3, 8, 24, 100, 129, 1024, 1500])
    dtype = draw.choice(swiglu.DTYPES)
    weight_dtype = draw.choice([None, torch.float32, torch.float32, dtype])
    layouts = [draw.choice(["plain", "plain", "wide", "transposed"]) for _ in range(2)]
    tile = swiglu_kernels.Tile(draw.choice([64, 256, 2048]), draw.choice([1, 2, 4]), draw.choice([1, 4]))
    case = f"seed {seed}: {rows} x {columns} {dtype}, weights {weight_dtype}, {layouts}, {tile}"

    y = laid_out((3 * torch.randn(rows, 2 * columns, generator=made)).to(device, dtype), layouts[0])
    grad = laid_out(torch.randn(rows, columns, generator=made).to(device, dtype), layouts[1])
    if draw.random() < 0.2:
        grad = torch.ones((), device=device, dtype=dtype).expand(rows, columns)  # what a plain sum hands back
    weights = None
    if weight_dtype is not None:
        weights = torch.rand(rows, 1, generator=made).to(device, weight_dtype)

    y64 = y.double().requires_grad_()
    w64 = None if weights is None else weights.double().requires_grad_()
    gate, up = y64.chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up * (1 if w64 is None else w64)
    want.backward(grad.double())
    assert y64.grad is not None
    size = (grad.double() * (1 if w64 is None else w64)).detach().abs()
    sizes = torch.cat([size * up.detach().abs(), size * gate.detach().abs()], dim=-1)

    y.requires_grad_()
    if weights is not None:
        weights.requires_grad_()
    out = swiglu.swiglu(y, weights)
    out.backward(grad)
    assert y.grad is not None
    alone = swiglu_kernels.forward(y.detach(), weights, tile)
    grads = swiglu_kernels.backward(grad, y.detach(), weights, tile)
    for how, result, grad_y in (("autograd", out.detach(), y.grad), ("kernel", alone, grads[0])):
        assert result.dtype == grad_y.dtype == dtype, f"{how}: {result.dtype}, {grad_y.dtype}, {case}"
        assert_close(f"{how}: output", result, want.detach(), want.detach().abs(), case)
        assert_close(f"{how}: gradient of y", grad_y, y64.grad, sizes, case)
    if weights is None or w64 is None:
        assert grads[1] is None
        return
    terms = torch.nn.functional.silu(gate).detach() * up.detach() * grad.double()
    assert weights.grad is not None
    assert w64.grad is not None
    for how, grad_w in (("autograd", weights.grad), ("kernel", grads[1])):
        assert grad_w is not None
        assert grad_w.dtype == weight_dtype, case
        assert_close(f"{how}: gradient of the weights", grad_w, w64.grad, terms.abs().sum(1, keepdim=True), case)


def main() -> int:
    """Run the cases."""
    device = sys.argv[1]
    # A GPU compiles nearly every case: two kernels, two tiles.
    seeds = range(*(int(word) for word in sys.argv[2:4] or (0, 24 if device == "cuda" else 40)))
    for seed in seeds:
        check(seed, device)
    print(f"{len(seeds)} cases within one rounding on {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
