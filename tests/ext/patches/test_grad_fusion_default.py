"""Proof of grad-fusion-default: the default setting trains where Apex is absent, and says what is off."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


@pytest.mark.skipif(
    importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None, reason="Apex is installed: nothing to mend"
)
@pytest.mark.usefixtures("world")
def test_linear_trains_with_fusion_asked_for_and_no_apex() -> None:
    config = ModelParallelConfig(gradient_accumulation_fusion=True, params_dtype=torch.float32)
    with pytest.warns(UserWarning, match="gradient accumulation fusion is off"):
        column = ColumnParallelLinear(8, 4, config=config, init_method=torch.nn.init.ones_, bias=False)
    row = RowParallelLinear(
        4,
        2,
        config=config,
        init_method=torch.nn.init.ones_,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=False,
    )
    for layer in (column, row):
        layer.weight.main_grad = torch.zeros_like(layer.weight)  # as Megatron's DDP sets it
    hidden, _ = column(torch.ones(3, 1, 8, device="cuda"))
    output, _ = row(hidden)
    output.sum().backward()
    assert torch.equal(column.weight.grad, torch.full_like(column.weight, 3.0 * 2))
    assert torch.equal(row.weight.grad, torch.full_like(row.weight, 3.0 * 8))
