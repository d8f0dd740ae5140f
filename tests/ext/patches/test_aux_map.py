"""Proof of aux-map: with the option the aux loss balances the chosen experts; without it nothing moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from routers import EXPERT_BIAS, router

pytestmark = pytest.mark.usefixtures("world")

AUX: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
GROUPS: dict[str, Any] = {"moe_router_num_groups": 4, "moe_router_group_topk": 1}
TOKENS = 64


def _aux_loss(option: dict[str, Any], bias: float = 0.0, **options: Any) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return the logged loss, the map that is dispatched and the scores, normalized over the experts."""
    torch.manual_seed(5)
    routing = router(**AUX, **options, **option)
    if bias:
        routing.expert_bias.normal_(std=bias)
    tokens = torch.randn(TOKENS, 1, 16, device="cuda") * 2
    get_moe_metrics_tracker().clear()
    _, routing_map = routing(tokens)
    logits = routing.gating(tokens)[:, 0]
    scores = torch.sigmoid(logits) if routing.score_function == "sigmoid" else torch.softmax(logits, -1)
    return (
        get_moe_metrics_tracker().metrics["load_balancing_loss"].values.sum().item(),
        routing_map,
        scores / scores.sum(-1, keepdim=True),
    )


def _formula(routing_map: torch.Tensor, scores: torch.Tensor) -> float:
    """E * sum(fraction of the choices * mean score), Switch Transformer (arXiv:2101.03961), equations 4 to 6."""
    fraction = routing_map.float().sum(0) / routing_map.sum()
    return (fraction @ scores.mean(0) * routing_map.shape[1]).item()


CASES = [({**GROUPS}, 0.0), ({**EXPERT_BIAS}, 0.3), ({**EXPERT_BIAS, **GROUPS}, 0.3)]


@pytest.mark.parametrize(("options", "bias"), CASES, ids=["groups", "bias", "both"])
def test_loss_is_of_the_dispatched_map(options: dict[str, Any], bias: float) -> None:
    loss, routing_map, scores = _aux_loss({"moe_ext_aux_loss_routing_map": True}, bias, **options)
    assert loss == pytest.approx(_formula(routing_map, scores), rel=1e-5)


@pytest.mark.parametrize(("options", "bias"), CASES, ids=["groups", "bias", "both"])
def test_without_the_option_nothing_moves(options: dict[str, Any], bias: float) -> None:
    loss, routing_map, scores = _aux_loss({}, bias, **options)
    plain = torch.zeros_like(routing_map).scatter(1, scores.topk(2).indices, True)
    assert loss == pytest.approx(_formula(plain, scores), rel=1e-5)
    assert abs(loss - _formula(routing_map, scores)) > 1e-4


def test_the_option_says_that_it_is_on() -> None:
    with pytest.warns(UserWarning, match="aux losses count the chosen experts"):
        router(**AUX, moe_ext_aux_loss_routing_map=True)


def test_option_changes_nothing_for_a_plain_router() -> None:
    on, *_ = _aux_loss({"moe_ext_aux_loss_routing_map": True})
    off, *_ = _aux_loss({})
    assert on == off


def test_padding_and_dropped_tokens() -> None:
    """Padding is left out; what the capacity drops stays in, since the router chose it."""
    options = {"moe_ext_aux_loss_routing_map": True, "moe_expert_capacity_factor": 0.5, **GROUPS}
    routing = router(**AUX, **options)
    tokens = torch.randn(TOKENS, 1, 16, device="cuda")
    padding = torch.zeros(TOKENS, 1, dtype=torch.bool, device="cuda")
    padding[40:] = True
    get_moe_metrics_tracker().clear()
    routing(tokens, padding)
    got = get_moe_metrics_tracker().metrics["load_balancing_loss"].values.sum().item()
    options.pop("moe_expert_capacity_factor")
    undropped = router(**AUX, **options)
    undropped.load_state_dict(routing.state_dict())
    _, routing_map = undropped(tokens[:40])
    scores = torch.softmax(routing.gating(tokens[:40])[:, 0], -1)
    assert got == pytest.approx(_formula(routing_map, scores), rel=1e-5)
