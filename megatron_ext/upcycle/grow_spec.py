"""What is wanted of a larger MoE, checked before anything is written, and what becomes of the function."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

from megatron_ext.errors import UserError
from megatron_ext.upcycle.router import RouterRule
from megatron_ext.upcycle.spec import Expectation

NewExperts = Literal["copy", "drop", "random"]
# Up to this strength (relative to the weights) the noise is called small and the first loss near; beyond it nothing is
# promised. `upcycle verify` measures either.
SMALL_NOISE = 0.02


@dataclass(frozen=True)
class Moe:
    """The MoE that grows, as its checkpoint's arguments describe it.

    Attributes:
        rule: E, top-k and how the router weighs.
        num_layers: Decoder layers.
        gated: The activation has a gate.
        interleaved: Gate and up rows are stored interleaved (--moe-mlp-glu-interleave-size).
        init_std: --init-method-std of its run.
        group_topk: --moe-router-group-topk, or None.
        balancing: --moe-router-load-balancing-type.
    """

    rule: RouterRule
    num_layers: int
    gated: bool
    interleaved: bool
    init_std: float
    group_topk: int | None
    balancing: str


@dataclass(frozen=True)
class Growth:
    """The larger MoE that is wanted.

    Attributes:
        multiple: M; E experts become M * E.
        topk: Experts a token in the larger MoE.
        new_experts: `copy`, `drop` (Drop-Upcycling) or `random`.
        drop_share: r, the share of a copy's intermediate channels that is drawn anew (`drop`).
        router_noise: Noise on the copies' router rows, relative to each row.
        router_shift: Length of the one vector that a set of copies adds to its router rows, relative to a row.
        expert_noise: Noise on the copies' weights, relative to each tensor.
        seed: For every random number.
    """

    multiple: int
    topk: int
    new_experts: NewExperts = "copy"
    drop_share: float = 0.5
    router_noise: float = 0.0
    router_shift: float = 0.0
    expert_noise: float = 0.0
    seed: int = 1234


def moe_from_args(args: Namespace) -> Moe:
    """Read the MoE's shape from a checkpoint's arguments.

    Raises:
        UserError: It is a model whose experts are not understood.
    """
    for name, why in {"heterogeneous_layers_config_path": "its layers differ from each other",
                      "heterogeneous_layers_config_encoded_json": "its layers differ from each other",
                      "hybrid_layer_pattern": "it is a hybrid model",
                      "hybrid_override_pattern": "it is a hybrid model"}.items():
        if getattr(args, name, None):
            raise UserError("this checkpoint cannot grow", where=f"{name}={getattr(args, name)}", why=why,
                            remedy="give the checkpoint of a GPT model with experts")
    return Moe(
        rule=RouterRule(
            num_experts=args.num_experts,
            topk=args.moe_router_topk,
            score=getattr(args, "moe_router_score_function", None) or "softmax",
            pre_softmax=bool(getattr(args, "moe_router_pre_softmax", False)),
            scaling_factor=getattr(args, "moe_router_topk_scaling_factor", None),
            num_groups=getattr(args, "moe_router_num_groups", None),
        ),
        num_layers=args.num_layers,
        gated=bool(getattr(args, "swiglu", False) or getattr(args, "quick_geglu", False)),
        interleaved=bool(getattr(args, "moe_mlp_glu_interleave_size", None)),
        init_std=args.init_method_std,
        group_topk=getattr(args, "moe_router_group_topk", None),
        balancing=str(getattr(args, "moe_router_load_balancing_type", "aux_loss")),
    )


def multiple(moe: Moe, num_experts: int) -> int:
    """Return M, after checking that the new number of experts is a multiple of the old one.

    Raises:
        UserError: It is not.
    """
    old = moe.rule.num_experts
    if num_experts <= old or num_experts % old:
        raise UserError(
            "the larger MoE does not hold whole copies of the smaller one",
            where=f"--num-experts {num_experts}, {old} in the checkpoint",
            remedy=f"use a multiple of {old}, such as {2 * old}",
            exit_code=64,
        )
    return num_experts // old


def check(moe: Moe, growth: Growth) -> None:
    """Raise UserError for the first thing that cannot work."""
    total = moe.rule.num_experts * growth.multiple
    if not 1 <= growth.topk <= total:
        raise UserError("a token cannot choose that many experts", where=f"top-k {growth.topk}, {total} experts",
                        remedy=f"ask for a top-k between 1 and {total}", exit_code=64)
    if moe.group_topk and growth.topk % moe.group_topk:
        raise UserError(
            "top-k does not divide among the routing groups",
            where=f"top-k {growth.topk}, {moe.group_topk} groups a token (--moe-router-group-topk)",
            remedy=f"use a top-k that is a multiple of {moe.group_topk}",
            exit_code=64,
        )
    if growth.new_experts == "drop" and not 0 < growth.drop_share <= 1:
        raise UserError("the dropped share is not a share", where=f"--drop-share {growth.drop_share}",
                        remedy="use a number above 0 and up to 1; the paper's best is 0.5", exit_code=64)
    if growth.new_experts == "drop" and moe.interleaved:
        raise UserError("Drop-Upcycling does not know where the gates are",
                        where="--moe-mlp-glu-interleave-size in the checkpoint's arguments",
                        remedy="use --new-experts copy with --expert-noise", exit_code=64)
    for flag, value in (("--router-noise", growth.router_noise), ("--router-shift", growth.router_shift),
                        ("--expert-noise", growth.expert_noise)):
        if not math.isfinite(value) or value < 0:
            raise UserError("noise cannot be negative or infinite", where=f"{flag} {value}",
                            remedy="use 0 or a small positive number", exit_code=64)
    if growth.new_experts == "random" and (growth.router_noise or growth.router_shift or growth.expert_noise):
        raise UserError("random experts have nothing to perturb", where="--new-experts random with noise or shift",
                        remedy="leave --router-noise, --router-shift and --expert-noise at 0", exit_code=64)


def expectation(moe: Moe, growth: Growth) -> Expectation:
    """Say what becomes of the function, and why."""
    rule, times = moe.rule, growth.multiple
    if growth.new_experts == "drop":
        return Expectation("changed", f"copies have {growth.drop_share:.0%} of their channels drawn anew")
    if growth.new_experts == "random":
        return Expectation("changed", "tokens choose random experts among the trained ones")
    if growth.topk != times * rule.topk:
        return _fewer(rule, growth)
    if rule.score != "softmax" and rule.topk == 1:
        return Expectation("changed", f"with top-1, {rule.score} weights a token by the score itself; with "
                           f"top-{growth.topk} Megatron makes the weights add up to 1")
    if "sinkhorn" in moe.balancing:
        return Expectation("changed", "sinkhorn chooses experts over the whole batch")
    noise = max(growth.router_noise, growth.expert_noise)
    if growth.router_shift or noise > SMALL_NOISE:
        return Expectation("changed", "the perturbation is strong")
    if noise:
        return Expectation("close", f"a token takes {times} near copies of each of its {rule.topk} experts")
    return Expectation("exact", f"a token takes all {times} copies of each of its {rule.topk} experts, at 1/{times} of "
                       "the weight each")


def _fewer(rule: RouterRule, growth: Growth) -> Expectation:
    """What happens where top-k does not grow with the experts."""
    times = growth.multiple
    whole = f"--router-topk {times * rule.topk} keeps the function, --router-shift most of it at the same cost"
    if not growth.router_shift:
        found = math.ceil(growth.topk / times)
        return Expectation("changed", f"copies have nearly the same logits: a token's {growth.topk} choices are about "
                           f"{found} of its former {rule.topk} experts and their twins; {whole}")
    if growth.topk == rule.topk and rule.score == "softmax" and not rule.pre_softmax and not growth.router_noise:
        return Expectation("changed", "only for tokens whose choices fall into two sets of copies; the others keep "
                           "their experts and weights, see `upcycle verify`")
    return Expectation("changed", "sets of copies are shifted against each other: most tokens find their experts "
                       "in one set, with other weights")
