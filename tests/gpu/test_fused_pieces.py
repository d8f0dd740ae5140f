"""The pieces that the gpu/ patches put in, against fp32 references: the loss and the fused weight gradient."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


def _relative(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())


def test_fused_weight_gradient_adds_the_product_in_fp32() -> None:
    from megatron_ext.runtime import wgrad

    assert wgrad.is_available()
    tokens, inputs, outputs = 1024, 256, 640
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    grad = torch.randn(tokens, outputs, device="cuda").bfloat16()
    start = torch.randn(outputs, inputs, device="cuda") * 100
    main_grad = start.clone()
    wgrad.wgrad_gemm_accum_fp32(x, grad, main_grad)
    wgrad.wgrad_gemm_accum_fp32(x, grad, main_grad)
    expected = start.double() + 2 * (grad.double().t() @ x.double())
    assert _relative(main_grad, expected) < 1e-5


def test_te_cross_entropy_equals_the_fp32_loss_and_gradient() -> None:
    import transformer_engine.pytorch.cross_entropy as te

    seq, batch, vocab = 256, 2, 50_001
    logits = (4 * torch.randn(seq, batch, vocab, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(vocab, (seq, batch), device="cuda")
    weight = torch.rand(seq, batch, device="cuda")
    exact = logits.detach().double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact.view(-1, vocab), labels.view(-1), reduction="none")
    (expected * weight.view(-1)).sum().backward()
    work = logits * 1  # not a leaf: the loss may overwrite it
    loss = te.parallel_cross_entropy(work, labels, 0.0, False, None, overwrite_input=True)
    (loss * weight).sum().backward()
    assert _relative(loss.view(-1), expected) < 1e-5
    assert exact.grad is not None
    assert logits.grad is not None
    assert _relative(logits.grad, exact.grad) < 5e-3
