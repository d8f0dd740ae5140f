"""From one dense MLP to the weights of E experts: pure functions on whole (unsharded) tensors.

Shapes: H hidden, F the dense MLP's width, f an expert's width, G = F / f the granularity (slices of the dense MLP),
R = E / G the copies of each slice. fc1 is [F, H], with a gated activation [2F, H] as (gate rows, then up rows);
fc2 is [H, F]. Expert e holds slice e mod G of copy e // G, in the order of Megatron's `upcycling_utils`.

Why the last projection alone is scaled. With the router's rows repeated for the G experts of a copy, a token picks
whole copies, and the experts of one copy get the same weight p. One copy then gives
    sum over slices of p * act(x W1_s) (c W2_s) = p * c * MLP(x)
whatever the activation is, because fc2 is linear. Over the chosen copies the weights p sum to w / G, where w is the sum
of all k weights of a token, so c = G / w gives MLP(x) back. Scaling fc1 as well, as Megatron does, is only right where
act(t x) = t^n act(x), which SiLU and GELU are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ScalingName = Literal["exact", "megatron", "none"]
ActivationName = Literal["swiglu", "gelu", "squared_relu", "relu", "geglu", "quick_geglu"]


@dataclass(frozen=True)
class Scaling:
    """What each part of the dense MLP is multiplied with on its way into an expert."""

    fc1: float = 1.0
    fc1_bias: float = 1.0
    fc2: float = 1.0
    fc2_bias: float = 1.0


@dataclass(frozen=True)
class Mlp:
    """The weights of one MLP, dense or expert: fc1 [F or 2F, H], fc2 [H, F], biases [F or 2F] and [H] or None."""

    fc1: Tensor
    fc2: Tensor
    fc1_bias: Tensor | None = None
    fc2_bias: Tensor | None = None


def exact_scaling(granularity: int, total_weight: float) -> Scaling:
    """Return the scaling that preserves the function for any activation.

    Args:
        granularity: G, slices of the dense MLP.
        total_weight: w, the sum of the k router weights of a token (see `router.total_weight`).
    """
    return Scaling(fc2=granularity / total_weight, fc2_bias=1 / total_weight)


def megatron_scaling(granularity: int, *, num_experts: int, topk: int, pre_softmax: bool, activation: str) -> Scaling:
    """Return Megatron's scaling: the same factor on fc1 and fc2.

    Source: arXiv 2410.07524, section on weight scaling, as done by megatron-core 0.19.2
    `transformer/moe/upcycling_utils.py`. Exact for squared ReLU; for SwiGLU and GELU only at granularity 1.
    """
    scale = float(granularity)
    if pre_softmax:
        # Uniform router weights are 1 / E each, and k / G slices groups are chosen.
        scale = num_experts * granularity / topk
    gated = activation.endswith("glu")
    factor = scale ** (1 / 3 if gated or activation == "squared_relu" else 1 / 2)
    return Scaling(fc1=factor, fc1_bias=factor, fc2=factor, fc2_bias=1.0)


def expert_from_dense(dense: Mlp, expert: int, *, granularity: int, gated: bool, scaling: Scaling) -> Mlp:
    """Return expert `expert` of a dense MLP: its slice, scaled, in the dense weights' dtypes."""

    def part(name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return expert_part(name, tensor, expert, granularity=granularity, gated=gated, scaling=scaling)

    fc1, fc2 = part("linear_fc1.weight", dense.fc1), part("linear_fc2.weight", dense.fc2)
    assert fc1 is not None
    assert fc2 is not None
    return Mlp(fc1, fc2, part("linear_fc1.bias", dense.fc1_bias), part("linear_fc2.bias", dense.fc2_bias))


def expert_part(part: str, dense: Tensor, expert: int, *, granularity: int, gated: bool, scaling: Scaling) -> Tensor:
    """Return one tensor of an expert from the dense MLP's tensor of the same name.

    Args:
        part: `linear_fc1.weight`, `linear_fc1.bias`, `linear_fc2.weight` or `linear_fc2.bias`.
        dense: That tensor of the dense MLP, whole.
        expert: e.
        granularity: G.
        gated: fc1 holds gate and up rows.
        scaling: The factors.

    Returns:
        A contiguous tensor of the same dtype that shares no memory with `dense`.
    """
    index = expert % granularity
    if part == "linear_fc2.weight":
        return scaled(slice_columns(dense, index, granularity), scaling.fc2)
    if part == "linear_fc2.bias":
        return scaled(dense, scaling.fc2_bias)
    factor = scaling.fc1 if part == "linear_fc1.weight" else scaling.fc1_bias
    return scaled(slice_rows(dense, index, granularity, gated=gated), factor)


def slice_rows(tensor: Tensor, index: int, count: int, *, gated: bool) -> Tensor:
    """Return slice `index` of `count` of fc1's rows ([F, H] or a bias [F]); gate and up rows are cut separately."""
    if not gated:
        return _part(tensor, index, count, dim=0)
    gate, up = torch.chunk(tensor, 2, dim=0)
    return torch.cat([_part(gate, index, count, dim=0), _part(up, index, count, dim=0)], dim=0)


def slice_columns(tensor: Tensor, index: int, count: int) -> Tensor:
    """Return slice `index` of `count` of fc2's columns ([H, F])."""
    return _part(tensor, index, count, dim=1)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return a contiguous copy of `tensor` times `factor`, rounded once to its own dtype."""
    if factor == 1.0:
        return tensor.clone(memory_format=torch.contiguous_format)
    return (tensor.float() * factor).to(tensor.dtype).contiguous()


def _part(tensor: Tensor, index: int, count: int, *, dim: int) -> Tensor:
    size = tensor.shape[dim] // count
    return tensor.narrow(dim, index * size, size)

