"""The router's gradients in bf16 halves, against fp64; what they do with inf and nan; and what is left to upstream.

On the CPU the two products are fp32 products of the same bf16 halves; tests/gpu runs cuBLAS's.
"""

from __future__ import annotations

import pytest
import torch

from megatron_ext.fused import router

BF16 = 2.0**-8  # largest relative rounding error
FP32 = 2.0**-24


def _case(tokens: int, experts: int, hidden: int = 48) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """X, W and the logits' gradient, whose sizes spread over six decades as a softmax's do."""
    made = torch.Generator().manual_seed(tokens * 1000 + experts)
    scale = 10.0 ** (-6 * torch.rand(tokens, experts, generator=made))
    return (
        torch.randn(tokens, hidden, generator=made).bfloat16(),
        (0.02 * torch.randn(experts, hidden, generator=made)).bfloat16(),
        scale * torch.randn(tokens, experts, generator=made),
    )


def test_the_two_halves_keep_sixteen_bits_of_a_gradient() -> None:
    made = torch.Generator().manual_seed(1)
    exponents = torch.randint(-100, 100, (4096, 8), generator=made)
    grad = torch.ldexp(1 + torch.rand(4096, 8, generator=made), exponents)
    grad[0] = 1 + 2.0**-8  # half way between two bf16 numbers
    grad[1] = 0
    high, low = router.split(grad).double().chunk(2, dim=1)
    left = (grad.double() - high - low).abs()
    assert bool((left <= 2.0**-17 * grad.double().abs()).all())
    # One half alone does not: the bound tells them apart.
    assert bool(((grad.double() - high).abs() > 2.0**-17 * grad.double().abs()).any())


def test_rows_of_any_strides_are_split_alike() -> None:
    grad = torch.randn(12, 20)
    for laid_out in (grad.t().contiguous().t(), torch.nn.functional.pad(grad, (3, 5))[:, 3:23]):
        assert torch.equal(router.split(laid_out), router.split(grad))


@pytest.mark.parametrize("tokens", [1, 7, 64, 1001])
@pytest.mark.parametrize("experts", [1, 6, 20, 64])
def test_gradients_are_within_one_rounding_of_fp64(tokens: int, experts: int) -> None:
    x, weight, grad = _case(tokens, experts)
    of_x, of_weight = router.gradients(x, weight, grad)
    g = grad.double()
    terms = 2.0**-17 + FP32 * 2 * max(tokens, experts)  # of the sum of the terms: the halves, and fp32's sums
    for got, a, b in ((of_x, g, weight.double()), (of_weight, g.t(), x.double())):
        assert got.dtype == torch.bfloat16
        exact, size = a @ b, a.abs() @ b.abs()
        assert got.shape == exact.shape
        assert bool(((got.double() - exact).abs() <= BF16 * exact.abs() + 2 * terms * size).all())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3.4e38])
def test_a_gradient_that_is_not_finite_stays_so_and_spreads_no_further(value: float) -> None:
    x, weight, grad = _case(5, 6)
    grad[2, 4] = value
    of_x, of_weight = router.gradients(x, weight, grad)
    assert (~of_x.isfinite()).any(dim=1).tolist() == [False, False, True, False, False]
    assert bool(of_x[2].isnan().all())  # what Megatron's check of the gradients looks for first
    assert (~of_weight.isfinite()).any(dim=1).tolist() == [False] * 4 + [True, False]


def test_the_smallest_gradients_lose_no_more_than_bf16_has_to() -> None:
    x, weight, grad = _case(4, 6)
    grad *= 1e-40  # below fp32's smallest normal number, as is what comes out
    of_x, of_weight = router.gradients(x, weight, grad)
    smallest = 2.0**-133  # bf16's
    for got, a, b in ((of_x, grad.double(), weight.double()), (of_weight, grad.double().t(), x.double())):
        assert bool(((got.double() - a @ b).abs() <= smallest * (1 + b.abs().sum(0))).all())


class _Quantized(torch.Tensor):
    """A subclass, as Transformer Engine's FP8 tensors are: its values need not be what its dtype says."""


X, W, G = torch.zeros(3, 8).bfloat16(), torch.zeros(4, 8).bfloat16(), torch.zeros(3, 4)


def test_the_cpu_is_left_to_upstream() -> None:
    assert not router.takes(X, W, G)


@pytest.mark.parametrize(
    ("tokens", "weight", "grad"),
    [
        pytest.param(X.float(), W.float(), G, id="fp32 model"),
        pytest.param(X.half(), W.half(), G, id="fp16 model"),
        pytest.param(X, W.float(), G, id="fp32 weight"),
        pytest.param(X, W, G.double(), id="fp64 router"),
        pytest.param(X, W, G.bfloat16(), id="bf16 router"),
        pytest.param(X.as_subclass(_Quantized), W, G, id="subclass"),
        pytest.param(X, W.as_subclass(_Quantized), G, id="weight of a subclass"),
        pytest.param(X.view(1, 3, 8), W, G, id="three dimensions"),
        pytest.param(X[:0], W, G[:0], id="no rows"),
    ],
)
def test_what_the_halves_do_not_do_is_left_to_upstream(
    monkeypatch: pytest.MonkeyPatch, tokens: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor
) -> None:
    monkeypatch.setattr(router, "_products_run", lambda tokens: True)  # there is no GPU here
    assert router.takes(X, torch.nn.Parameter(W), G)
    assert not router.takes(tokens, weight, grad)


def test_a_variable_leaves_all_to_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_products_run", lambda tokens: True)
    monkeypatch.setenv(router.VARIABLE, "megatron")
    assert not router.takes(X, W, G)
