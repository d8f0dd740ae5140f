"""Proof of router-bias-dtype: Transformer Engine's GEMM gets a bias of the type of its output.

cuBLASLt refuses another type (a GPU is needed to see it); the stand-in for the GEMM refuses it the same way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils


def _gemm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, layout: str = "TN", bias: Any = None,
          grad: bool = False) -> tuple[torch.Tensor]:  # fmt: skip
    if bias is not None and bias.dtype != out_dtype:
        raise RuntimeError(f"bias {bias.dtype}, output {out_dtype}")
    left, right = a.float(), b.float()
    product = {"TN": lambda: right @ left.t(), "NN": lambda: right @ left, "NT": lambda: right.t() @ left}[layout]()
    return ((product if bias is None else product + bias.float()).to(out_dtype),)


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_bf16_bias_with_fp32_logits(monkeypatch: pytest.MonkeyPatch, parameters: torch.dtype) -> None:
    monkeypatch.setattr(moe_utils, "te_general_gemm", _gemm)
    torch.manual_seed(1)
    tokens = torch.randn(5, 16, dtype=parameters, requires_grad=True)
    weight = torch.randn(8, 16, dtype=parameters, requires_grad=True)
    bias = torch.randn(8, dtype=parameters, requires_grad=True)
    logits = moe_utils.router_gating_linear(tokens, weight, bias, torch.float32)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, tokens.float() @ weight.float().t() + bias.float())
    logits.sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [5.0] * 8
