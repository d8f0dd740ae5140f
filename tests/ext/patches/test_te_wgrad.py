"""Proof of te-wgrad: without Apex the linear layers call our module, which adds the product into main_grad."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import layers


@pytest.mark.skipif(
    importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None, reason="Apex is installed: it is used"
)
@pytest.mark.usefixtures("world")
def test_output_layer_accumulates_through_the_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ext.runtime import wgrad

    def on_cpu(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad += grad_output.t() @ inputs  # what the GEMM does; tests/gpu runs it

    monkeypatch.setattr(wgrad, "wgrad_gemm_accum_fp32", on_cpu)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    config = ModelParallelConfig(gradient_accumulation_fusion=True, params_dtype=torch.float32)
    layer = layers.ColumnParallelLinear(8, 4, config=config, init_method=torch.nn.init.ones_, bias=False)
    layer.weight.main_grad = torch.ones_like(layer.weight)
    output, _ = layer(torch.ones(3, 1, 8, device="cuda"))
    output.sum().backward()
    assert torch.equal(layer.weight.main_grad, torch.full_like(layer.weight, 1 + 3.0))
    assert layer.weight.grad is None
