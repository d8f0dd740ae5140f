"""Options that meet in one layer, on real expert-parallel ranks, against the plain formulas on all tokens at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fork import run
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from small import EXPERTS, Training, config, groups, training

pytestmark = pytest.mark.ranks

TOKENS, RATE = 12, 1e-2
BIAS_AND_GROUPS: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": RATE,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 1,
    "bf16": False,
    "params_dtype": torch.float32,
}


def _layer(**options: Any) -> MoELayer:
    settings = config(**options)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    layer = MoELayer(settings, spec.submodules.mlp.keywords["submodules"]).cuda()
    layer.set_layer_number(1)
    return layer


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def _bias_padding_and_groups() -> None:
    groups(8)
    layer = _layer(expert_parallel=8, **BIAS_AND_GROUPS)
    rank = torch.distributed.get_rank()
    bias = torch.linspace(-0.2, 0.2, EXPERTS).cuda()
    layer.router.expert_bias.copy_(bias)
    tokens = torch.randn(TOKENS, 1, 16, generator=torch.Generator().manual_seed(rank)).cuda()
    # Rank r pads r tokens; as many tokens as experts would once have hidden a wrong mask.
    padding = torch.zeros(1, TOKENS, dtype=torch.bool, device="cuda")
    padding[0, TOKENS - rank :] = True
    layer(tokens, padding_mask=padding)

    scores = torch.sigmoid(layer.router.gating(tokens)[:, 0])
    by_group = (scores + bias).view(TOKENS, 4, 2)
    best = by_group.topk(2, dim=-1).values.sum(-1).argmax(-1)  # one group a token: both of its experts
    chosen = torch.zeros(TOKENS, 4, 2, device="cuda").scatter(1, best[:, None, None].expand(-1, 1, 2), 1.0)
    chosen = chosen.view(TOKENS, EXPERTS)
    mine = chosen[: TOKENS - rank].sum(0)
    assert layer.router.local_tokens_per_expert.tolist() == mine.tolist()

    layer.config.moe_router_bias_update_rate = RATE
    _update_router_expert_bias([layer], layer.config)
    counts = _gathered(mine).sum(0)
    assert counts.sum() == 2 * sum(TOKENS - r for r in range(8))
    torch.testing.assert_close(layer.router.expert_bias, bias + RATE * torch.sign(counts.mean() - counts))


def test_expert_bias_with_padding_and_group_limits() -> None:
    run(8, _bias_padding_and_groups)


def _starve(trained: Training) -> None:
    """Send every token to experts 0 and 1, which rank 0 holds: the bias decides, whatever the scores."""
    for module in trained.model.modules():
        if hasattr(module, "expert_bias"):
            module.expert_bias[:2] = 10.0


def _experts(trained: Training) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trained.model.named_parameters() if ".experts." in n}


def _rank_without_tokens(dispatcher: str, bucket_size: int | None) -> None:
    rank = torch.distributed.get_rank()
    losses = {}
    for expert_parallel in (4, 1):
        groups(expert_parallel)
        options = {**BIAS_AND_GROUPS, "moe_token_dispatcher_type": dispatcher, "moe_router_bias_update_rate": 0.0}
        options.update(moe_router_num_groups=None, moe_router_group_topk=None)
        trained = training(config(expert_parallel, **options), bucket_size=bucket_size)
        # The same weights under both: every expert is like expert 0 of its layer on rank 0.
        for name, parameter in sorted(trained.model.named_parameters()):
            layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else 9
            kind = f"{layer}{'fc1' if 'fc1' in name else 'fc2'}" if ".experts." in name else name
            seed = sum(ord(letter) * (place + 1) for place, letter in enumerate(kind))
            made = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
            parameter.data.copy_(made + 1.0 if "norm.weight" in name else made)
        trained.optimizer.reload_model_params()
        _starve(trained)
        before = _experts(trained)
        losses[expert_parallel] = [trained.step(seed) for seed in range(3)]
        after = _experts(trained)
        if expert_parallel == 4:
            # Rank 0 and 4 hold experts 0 and 1. The others' experts feel nothing but the weight decay.
            held = {rank % 4 * 2, rank % 4 * 2 + 1}
            for name, value in after.items():
                assert value.isfinite().all(), name
                decayed = before[name] * (1 - 1e-2 * 0.1) ** 3
                untouched = torch.allclose(value, decayed, rtol=1e-5, atol=1e-7)
                assert untouched == (not held & {0, 1}), f"rank {rank} {name}"
    torch.testing.assert_close(torch.tensor(losses[4]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("bucket_size", [None, 1500], ids=["one bucket", "overlapped"])
def test_rank_without_tokens_in_forward_backward_and_optimizer(dispatcher: str, bucket_size: int | None) -> None:
    run(8, _rank_without_tokens, dispatcher, bucket_size)
