"""Proof of recompute-without-te: recompute without outputs runs where Transformer Engine is not installed."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel import random


@pytest.mark.usefixtures("world")
def test_the_default_asks_for_no_fp8() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    recompute = random.CheckpointWithoutOutput()
    output = recompute.checkpoint(torch.sin, x)
    assert not recompute.fp8
    torch.testing.assert_close(output, torch.sin(x))
