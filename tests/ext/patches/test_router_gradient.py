"""Proof of gpu/router-gradient: the router's backward goes through bf16 halves where it can, with upstream's result.

The question whether the tokens lie on a GPU is the one thing replaced; tests/gpu asks it for real.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from routers import router

from megatron_ext.fused import router as fused

calls: list[tuple[torch.Size, torch.Size]] = []


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fused.gradients

    def counted(tokens: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((tokens.shape, grad.shape))
        return real(tokens, weight, grad)

    calls.clear()
    monkeypatch.setattr(fused, "_products_run", lambda tokens: True)
    monkeypatch.setattr(fused, "gradients", counted)


def _gradients(*, parameters: torch.dtype, logits: torch.dtype, bias: bool) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    tokens, weight, biases = (torch.randn(*shape, generator=made).to(parameters).requires_grad_()
                              for shape in ((6, 2, 16), (8, 16), (8,)))  # fmt: skip
    out = router_gating_linear(tokens, weight, biases if bias else None, logits)
    assert out.dtype == logits
    out.backward(torch.randn(6, 2, 8, generator=made).to(logits))
    found = [tensor.grad for tensor in (tokens, weight, *([biases] if bias else []))]
    assert all(grad is not None and grad.dtype == parameters for grad in found)
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("bias", [False, True])
def test_bf16_gradients_go_through_the_halves(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    ours = _gradients(parameters=torch.bfloat16, logits=torch.float32, bias=bias)
    assert calls == [((12, 16), (12, 8))], "upstream's products ran"
    monkeypatch.setenv(fused.VARIABLE, "megatron")
    upstream = _gradients(parameters=torch.bfloat16, logits=torch.float32, bias=bias)
    assert len(calls) == 1
    for mine, theirs in zip(ours, upstream, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=2.0**-7, atol=1e-4)  # a rounding the other way at most


@pytest.mark.parametrize(("parameters", "logits"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float64)])
def test_other_types_stay_with_upstream(parameters: torch.dtype, logits: torch.dtype) -> None:
    _gradients(parameters=parameters, logits=logits, bias=False)
    assert calls == [], "a type that the halves do not hold reached them"


@pytest.mark.usefixtures("world")
def test_a_router_trains_through_the_halves() -> None:
    built = router(params_dtype=torch.bfloat16)
    assert built.weight.dtype == torch.bfloat16
    tokens = torch.randn(10, 1, 16, device="cuda").bfloat16().requires_grad_()
    probs, _ = built(tokens)
    probs.square().sum().backward()
    assert len(calls) == 1, "upstream's products ran"
    assert tokens.grad is not None
    assert bool(tokens.grad.isfinite().all())
    assert bool(built.weight.grad.abs().sum() > 0)
