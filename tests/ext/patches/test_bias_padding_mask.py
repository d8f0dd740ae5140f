"""Proof of bias-padding-mask: padding tokens are not counted for the expert bias, whatever the shapes."""

from __future__ import annotations

import pytest
import torch
from routers import EXPERT_BIAS, router

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize(("tokens", "padded"), [(6, 2), (8, 6), (8, 0), (8, 8)])
def test_only_real_tokens_are_counted(tokens: int, padded: int) -> None:
    counting = router(**EXPERT_BIAS)
    padding = torch.zeros(tokens, 1, dtype=torch.bool, device="cuda")
    padding[tokens - padded :] = True
    _, routing_map = counting(torch.randn(tokens, 1, 16, device="cuda"), padding)
    expected = routing_map[: tokens - padded].sum(0)
    assert counting.local_tokens_per_expert.tolist() == expected.tolist()
