"""Proof of device-neutral-type: parameters are told apart by dtype on any device."""

from __future__ import annotations

import re

import pytest
import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from source import source_of

OPTIMIZERS = ("clip_grads", "distrib_optimizer", "optimizer")


@pytest.mark.parametrize("module", OPTIMIZERS)
def test_optimizer_sources_name_no_cuda_type(module: str) -> None:
    compared = re.compile(r"(==|in \[)\s*'torch\.cuda\.\w+Tensor'")
    assert not compared.findall(source_of(f"megatron.core.optimizer.{module}"))


def test_gradients_of_any_device_are_clipped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
