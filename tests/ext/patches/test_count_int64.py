"""Proof of count-int64: the counts behind the expert bias and the global aux loss are exact under bf16."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from routers import EXPERT_BIAS, router

pytestmark = pytest.mark.usefixtures("world")


def test_bf16_model_counts_every_token() -> None:
    counting = router(**EXPERT_BIAS).bfloat16()
    one_batch = torch.zeros(401, 8, dtype=torch.bool, device="cuda")
    one_batch[:, 0] = True
    for _ in range(100):
        counting._apply_expert_bias(one_batch)
    assert counting.local_tokens_per_expert.tolist() == [40_100] + [0] * 7  # bf16 makes it 40,704


def test_bf16_model_averages_over_every_microbatch() -> None:
    options = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01}
    counting = router(**options).bfloat16()
    for _ in range(300):
        counting(torch.ones(5, 1, 16, dtype=torch.bfloat16, device="cuda"))
    assert int(counting.ga_steps) == 300  # bf16 stays at 256
    assert sorted(counting.global_tokens_per_expert.tolist())[-2:] == [1500, 1500]


def test_bias_step_has_the_sign_of_the_exact_difference() -> None:
    # The mean is 40,000.25: expert 0 is over it by a quarter and must fall. Beyond 2**24 fp32 would not see it either.
    for scale in (1, 1000):
        tokens = torch.tensor([40_001 * scale, 40_000 * scale, 40_000 * scale, 40_000 * scale], device="cuda")
        updated = get_updated_expert_bias(tokens, torch.zeros(4, device="cuda"), 1e-3)
        torch.testing.assert_close(updated, torch.tensor([-1e-3, 1e-3, 1e-3, 1e-3], device="cuda"))
    tokens = torch.tensor([2**26 + 1, 2**26 - 1, 2**26, 2**26], device="cuda")
    updated = get_updated_expert_bias(tokens, torch.zeros(4, device="cuda"), 1e-3)
    torch.testing.assert_close(updated, torch.tensor([-1e-3, 1e-3, 0, 0], device="cuda"))
