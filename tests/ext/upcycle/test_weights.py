"""Weight arithmetic: hand-made numbers first, then the whole layer in plain torch."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_ext.errors import UserError
from megatron_ext.upcycle import router, weights
from megatron_ext.upcycle.router import RouterRule
from megatron_ext.upcycle.weights import Mlp, Scaling


def test_slices_of_a_plain_mlp_by_hand():
    dense = Mlp(fc1=torch.tensor([[1.0], [2.0], [3.0], [4.0]]), fc2=torch.tensor([[10.0, 20.0, 30.0, 40.0]]))
    made = [weights.expert_from_dense(dense, e, granularity=2, gated=False, scaling=Scaling(fc2=2.0)) for e in range(4)]
    assert [m.fc1.flatten().tolist() for m in made] == [[1, 2], [3, 4], [1, 2], [3, 4]]
    assert [m.fc2.flatten().tolist() for m in made] == [[20, 40], [60, 80], [20, 40], [60, 80]]


def test_slices_of_a_gated_mlp_keep_gate_and_up_together():
    rows = torch.tensor([[1.0], [2.0], [3.0], [4.0], [-1.0], [-2.0], [-3.0], [-4.0]])
    dense = Mlp(fc1=rows, fc2=torch.ones(1, 4), fc1_bias=rows[:, 0] * 10)
    second = weights.expert_from_dense(dense, 1, granularity=2, gated=True, scaling=Scaling())
    assert second.fc1.flatten().tolist() == [3, 4, -3, -4]
    assert second.fc1_bias is not None
    assert second.fc1_bias.tolist() == [30, 40, -30, -40]


def test_last_bias_is_shared_out_by_the_router_weights():
    dense = Mlp(fc1=torch.ones(4, 1), fc2=torch.ones(1, 4), fc2_bias=torch.tensor([6.0]))
    factors = weights.exact_scaling(2, total_weight=3.0)
    made = weights.expert_from_dense(dense, 0, granularity=2, gated=False, scaling=factors)
    assert made.fc2_bias is not None
    assert made.fc2_bias.tolist() == [2.0]
    assert factors.fc2 == pytest.approx(2 / 3)


def test_experts_do_not_share_memory_with_the_dense_model():
    dense = Mlp(fc1=torch.ones(2, 1), fc2=torch.ones(1, 2))
    made = weights.expert_from_dense(dense, 0, granularity=1, gated=False, scaling=Scaling())
    made.fc1.zero_()
    made.fc2.zero_()
    assert dense.fc1.sum() == 2
    assert dense.fc2.sum() == 2


def test_bf16_is_rounded_once():
    value = torch.tensor([1.0078125], dtype=torch.bfloat16)
    assert weights.scaled(value, 3.0).item() == torch.tensor(1.0078125 * 3).to(torch.bfloat16).item()


def test_megatron_factors():
    swiglu = weights.megatron_scaling(8, num_experts=64, topk=8, pre_softmax=False, activation="swiglu")
    assert (swiglu.fc1, swiglu.fc2, swiglu.fc2_bias) == (pytest.approx(2.0), pytest.approx(2.0), 1.0)
    gelu = weights.megatron_scaling(4, num_experts=8, topk=4, pre_softmax=True, activation="gelu")
    assert gelu.fc1 == pytest.approx(math.sqrt(8 * 4 / 4))


@pytest.mark.parametrize(
    ("rule", "value", "for_any_router"),
    [
        (RouterRule(8, 2), 1.0, True),
        (RouterRule(8, 2, scaling_factor=2.5), 2.5, True),
        (RouterRule(8, 2, pre_softmax=True), 0.25, False),
        (RouterRule(1, 1, pre_softmax=True), 1.0, True),
        (RouterRule(8, 2, score="sigmoid", scaling_factor=2.0), 2.0, True),
        (RouterRule(8, 1, score="sigmoid"), 0.5, False),
        (RouterRule(8, 1, score="sqrtsoftplus"), math.sqrt(math.log(2)), False),
    ],
)
def test_total_weight(rule, value, for_any_router):
    assert router.total_weight(rule) == router.TotalWeight(pytest.approx(value), for_any_router)


def test_router_rows_repeat_for_each_slice_and_differ_between_layers():
    rows = router.router_rows(num_experts=8, hidden=4, granularity=4, std=1.0, seed=1, name="a", dtype=torch.float32)
    assert rows.shape == (8, 4)
    assert torch.equal(rows[0:4], rows[0].expand(4, 4))
    assert not torch.equal(rows[0], rows[4])
    other = router.router_rows(num_experts=8, hidden=4, granularity=4, std=1.0, seed=1, name="b", dtype=torch.float32)
    assert not torch.equal(rows, other)


def test_top_k_that_breaks_a_copy_is_refused():
    with pytest.raises(UserError, match="whole copies"):
        router.check_rule(RouterRule(64, 6), 8)
    with pytest.raises(UserError, match="routing group"):
        router.check_rule(RouterRule(16, 4, num_groups=8), 4)
    router.check_rule(RouterRule(16, 4, num_groups=2), 4)


ACTIVATIONS = {
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "gelu": F.gelu,
    "squared_relu": lambda x: F.relu(x) ** 2,
}


def forward(mlp: Mlp, x: Tensor, activation: str) -> Tensor:
    bias = 0 if mlp.fc1_bias is None else mlp.fc1_bias
    middle = ACTIVATIONS[activation](x @ mlp.fc1.T + bias)
    return middle @ mlp.fc2.T + (0 if mlp.fc2_bias is None else mlp.fc2_bias)


def route(rule: RouterRule, logits: Tensor) -> Tensor:
    """Dense [T, E] router weights, written from the definition and not from the code under test."""
    if rule.score == "softmax" and rule.pre_softmax:
        scores = logits.softmax(-1)
        chosen = scores.topk(rule.topk).indices
        picked = scores.gather(1, chosen)
    elif rule.score == "softmax":
        picked, chosen = logits.topk(rule.topk)
        picked = picked.softmax(-1)
    else:
        scores = logits.sigmoid() if rule.score == "sigmoid" else F.softplus(logits).sqrt()
        picked, chosen = scores.topk(rule.topk)
        picked = picked / picked.sum(-1, keepdim=True) if rule.topk > 1 else picked
    return torch.zeros_like(logits).scatter(1, chosen, picked * (rule.scaling_factor or 1.0))


def layer_error(activation: str, rule: RouterRule, count: int, *, biases: bool,
                scaling: Scaling | None = None) -> float:
    torch.manual_seed(0)
    hidden, ffn = 16, 32
    wide = ffn * (2 if activation == "swiglu" else 1)
    dense = Mlp(torch.randn(wide, hidden), torch.randn(hidden, ffn), torch.randn(wide) if biases else None,
                torch.randn(hidden) if biases else None)
    dense = Mlp(*(None if t is None else t.double() for t in (dense.fc1, dense.fc2, dense.fc1_bias, dense.fc2_bias)))
    x = torch.randn(50, hidden, dtype=torch.float64)
    weight = router.total_weight(rule)
    factors = scaling or weights.exact_scaling(count, weight.value)
    std = router.init_std("auto", weight=weight, granularity=count, hidden=hidden, normal_std=0.5)
    rows = router.router_rows(num_experts=rule.num_experts, hidden=hidden, granularity=count, std=std, seed=3,
                              name="r", dtype=torch.float64)
    probs = route(rule, x @ rows.T)
    total = torch.zeros_like(x)
    for e in range(rule.num_experts):
        part = weights.expert_from_dense(dense, e, granularity=count, gated=activation == "swiglu", scaling=factors)
        total += probs[:, e : e + 1] * forward(part, x, activation)
    wanted = forward(dense, x, activation)
    return float((total - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("rule", "count"),
    [
        (RouterRule(8, 2), 1),
        (RouterRule(64, 8), 8),
        (RouterRule(16, 8, scaling_factor=2.5), 4),
        (RouterRule(16, 4, score="sigmoid"), 4),
        (RouterRule(8, 4, score="sqrtsoftplus"), 2),
        (RouterRule(1, 1, pre_softmax=True), 1),
        (RouterRule(4, 4, pre_softmax=True), 2),
    ],
)
def test_exact_scaling_gives_the_dense_output_for_any_router(activation, biases, rule, count):
    assert layer_error(activation, rule, count, biases=biases) < 1e-6


@pytest.mark.parametrize("rule", [RouterRule(8, 2, pre_softmax=True), RouterRule(8, 1, score="sigmoid")])
def test_weights_that_depend_on_the_router_start_equal(rule):
    assert layer_error("swiglu", rule, 1, biases=True) < 3e-5


def test_megatron_scaling_breaks_swiglu_but_not_squared_relu():
    rule = RouterRule(64, 8)

    def error(activation):
        given = weights.megatron_scaling(8, num_experts=64, topk=8, pre_softmax=False, activation=activation)
        return layer_error(activation, rule, 8, biases=False, scaling=given)

    assert error("squared_relu") < 1e-6
    assert error("swiglu") > 0.04
    assert error("gelu") > 0.02
