"""The new router: what its weights add up to, and how its rows are drawn.

T tokens, H hidden, E experts, K top-k, G granularity, R = E / G copies.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_ext.errors import UserError

ScoreName = Literal["softmax", "sigmoid", "sqrtsoftplus"]
InitName = Literal["auto", "normal", "small", "zero"]

# The spread of the logits at the start where only equal weights preserve the function. Small enough that a token's
# weights add up to the uniform sum within a few 1e-6, large enough that fp32 still tells the experts apart.
SMALL_LOGIT_STD = 3e-6
# With slices a tie between two copies would break both, so the logits must stay further apart.
SMALL_LOGIT_STD_SLICED = 1e-3


@dataclass(frozen=True)
class RouterRule:
    """How the trained router turns logits into weights (the flags of Megatron's `TopKRouter`).

    Attributes:
        num_experts: E.
        topk: K, experts a token.
        score: `softmax`, `sigmoid` or `sqrtsoftplus` (--moe-router-score-function).
        pre_softmax: Softmax over all E experts before the choice (--moe-router-pre-softmax).
        scaling_factor: --moe-router-topk-scaling-factor; None or 0 means 1.
        num_groups: --moe-router-num-groups, or None.
    """

    num_experts: int
    topk: int
    score: ScoreName = "softmax"
    pre_softmax: bool = False
    scaling_factor: float | None = None
    num_groups: int | None = None


@dataclass(frozen=True)
class TotalWeight:
    """The sum of a token's K router weights, and whether it is that for every router or for equal logits only."""

    value: float
    for_any_router: bool


def total_weight(rule: RouterRule) -> TotalWeight:
    """Return the sum of the K weights of a token (megatron-core `moe_utils.topk_routing_with_score_function`)."""
    factor = rule.scaling_factor or 1.0
    everyone = rule.topk == rule.num_experts
    if rule.score == "softmax":
        if not rule.pre_softmax or everyone:
            return TotalWeight(factor, True)
        return TotalWeight(factor * rule.topk / rule.num_experts, False)
    if rule.topk > 1:
        return TotalWeight(factor, True)
    at_zero = 0.5 if rule.score == "sigmoid" else math.sqrt(math.log(2))
    return TotalWeight(factor * at_zero, False)


def check_rule(rule: RouterRule, granularity: int) -> None:
    """Raise UserError where tokens could not choose whole copies."""
    if not 1 <= rule.topk <= rule.num_experts:
        raise UserError(
            "a token chooses at least one expert, and cannot choose more experts than there are",
            where=f"top-k {rule.topk}, {rule.num_experts} experts",
            remedy=f"ask for a top-k of 1 to {rule.num_experts}",
        )
    if rule.topk % granularity:
        raise UserError(
            "top-k does not choose whole copies of the dense MLP",
            where=f"top-k {rule.topk}, granularity {granularity}",
            why=f"a copy is {granularity} experts that share a router row; any other number of them leaves a part of "
            "the MLP out",
            remedy=f"use a top-k that is a multiple of {granularity}, or wider experts",
        )
    if rule.num_groups and (rule.num_experts // rule.num_groups) % granularity:
        raise UserError(
            "a routing group cuts through a copy of the dense MLP",
            where=f"{rule.num_experts} experts in {rule.num_groups} groups, granularity {granularity}",
            remedy="use fewer routing groups, so that each holds whole copies",
        )


def init_std(init: InitName, *, weight: TotalWeight, granularity: int, hidden: int, normal_std: float) -> float:
    """Return the standard deviation of the router's rows.

    Args:
        init: `normal` is the model's own std; `small` a spread so low that the weights are equal; `zero`; `auto` is
            `normal` where any router preserves the function, else `small`.
        weight: From `total_weight`.
        granularity: G.
        hidden: H; the router's input is normalized, so a row of std s gives logits of std s * sqrt(H).
        normal_std: The model's --init-method-std.
    """
    if init == "auto":
        init = "normal" if weight.for_any_router else "small"
    if init == "normal":
        return normal_std
    if init == "zero":
        return 0.0
    return (SMALL_LOGIT_STD if granularity == 1 else SMALL_LOGIT_STD_SLICED) / math.sqrt(hidden)


def router_rows(*, num_experts: int, hidden: int, granularity: int, std: float, seed: int, name: str,
                dtype: torch.dtype) -> Tensor:
    """Return the router's weight [E, H]: R rows drawn from N(0, std), each repeated for its G slices.

    Args:
        num_experts: E.
        hidden: H.
        granularity: G.
        std: Standard deviation.
        seed: The upcycling seed.
        name: The tensor's name in the checkpoint, layer number included: makes every layer's draw its own, and the
            same in any order and on any rank.
        dtype: Of the result; the draw is in fp32.
    """
    rows = normal((num_experts // granularity, hidden), std=std, seed=seed, name=name)
    return rows.repeat_interleave(granularity, dim=0).to(dtype)


def normal(shape: tuple[int, ...], *, std: float, seed: int, name: str) -> Tensor:
    """Return fp32 numbers from N(0, std) that depend on seed, name and shape only (drawn on the CPU)."""
    return torch.randn(shape, generator=generator(seed, name), dtype=torch.float32) * std


def generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator for one named tensor."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
