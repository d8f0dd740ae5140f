"""Per-token statistics of one router or expert call, summed on the device. No host copies, no Megatron.

Every function takes tensors and returns float64 (or int64) sums on the same device; the formulas turn reduced sums
into numbers. Shapes: T tokens (only the valid ones count where `valid` is given), E experts, k experts a token, R
dispatched rows.

The torch code here runs on the CPU and is the reference. On a GPU the passes over [T, E] and [R, H] are Triton kernels
(`tally_kernels.py`): there every torch operation would read and write its whole table once more.
"""

from __future__ import annotations

import math
import os
from types import ModuleType

import torch
from torch import Tensor

KERNELS_VARIABLE = "MOE_EXT_OBSERVE_KERNELS"  # "torch" switches the Triton kernels off

# What `logit_sums`, `flip_sums` and `weight_sums` return, in this order: the columns of the layers' sums.
LOGIT_FIELDS = ("tokens", "z_squares", "router_entropy")
FLIP_FIELDS = ("flip_tokens", "flips", "order_flips", "bf16_flips", "unlike")
WEIGHT_FIELDS = (
    "weighted_tokens",
    "weight_entropy",
    "top_weight",
    "ratio_tokens",
    "ratio",
    "size",
    "size_squares",
)
AUX_FIELDS = ("assignments", "aux_differs")


def valid_counts(routing_map: Tensor, padding: Tensor | None) -> Tensor:
    """Return int64 [E] assignments of a bool [T, E] map, without padding (bool [T], True is padding)."""
    if padding is not None:
        routing_map = routing_map & ~padding[:, None]
    return routing_map.sum(0, dtype=torch.int64)


def logit_sums(logits: Tensor, valid: Tensor | None) -> Tensor:
    """Return LOGIT_FIELDS of [T, E] logits: token count, sum of logsumexp^2, sum of H(softmax) / log E."""
    kernels = _kernels(logits)
    if kernels:
        return kernels.logit_sums(logits, valid)
    z = logits.float()
    log_p = torch.log_softmax(z, -1)
    entropy = -(log_p.exp() * log_p).sum(-1) / _log(z.shape[-1])
    return _sums(valid, torch.logsumexp(z, -1).double().square(), entropy)


def flip_sums(
    *,
    chosen: Tensor,
    native: Tensor,
    exact: Tensor,
    coarse: Tensor | None,
    order: Tensor | None,
    valid: Tensor | None,
) -> Tensor:
    """Return FLIP_FIELDS: how many tokens change their set of experts.

    Args:
        chosen: bool [T, E], the map that was dispatched.
        native: bool [T, E], recomputed from the logits in the router's own precision.
        exact: bool [T, E], recomputed from fp32 logits.
        coarse: bool [T, E], recomputed from bf16 logits; None where the router is no fp32 router.
        order: bool [T], whether the order of the chosen experts changed in fp32; None where that can't be said.
        valid: bool [T] or None for all.

    `unlike` counts where `native` isn't `chosen`: above 0 only where something else than these logits decides.
    """
    kernels = _kernels(chosen)
    if kernels:
        return kernels.flip_sums(chosen, native, exact, coarse, order, valid)
    flips = (native != exact).any(-1)
    none = torch.zeros_like(flips)
    return _sums(
        valid,
        flips,
        none if order is None else order | flips,
        none if coarse is None else (coarse != exact).any(-1),
        (native != chosen).any(-1),
    )


def order_changed(native: Tensor, exact: Tensor, native_map: Tensor, exact_map: Tensor, topk: int) -> Tensor:
    """Return bool [T]: whether the chosen experts, ordered by their logits, differ between two precisions."""
    return (_ordered(native, native_map, topk) != _ordered(exact, exact_map, topk)).any(-1)


def weight_sums(probs: Tensor, topk: int, valid: Tensor | None) -> Tensor:
    """Return WEIGHT_FIELDS of sparse [T, E] mixing weights, at most `topk` of a row above 0 (the chosen ones).

    A token whose every assignment was dropped weighs nothing; one with a single weight has no ratio.
    """
    kernels = _kernels(probs)
    if kernels:
        return kernels.weight_sums(probs, topk, valid)
    w = probs.float().topk(topk, -1).values.double()
    total = w.sum(-1)
    some = total > 0
    share = torch.where(some[:, None], w / total.clamp_min(torch.finfo(torch.float64).tiny)[:, None], 0.0)
    entropy = -torch.special.xlogy(share, share).sum(-1) / _log(topk)
    squares = w.square().sum(-1)
    second = w[:, 1] if topk > 1 else torch.zeros_like(total)
    pair = second > 0
    ratio = torch.where(pair, w[:, 0] / torch.where(pair, second, 1.0), 0.0)
    kept = some if valid is None else some & valid
    sizes = _sums(kept, squares.sqrt(), squares)[1:]
    return torch.cat([_sums(kept, entropy, share[:, 0]), _sums(kept & pair, ratio), sizes])


def width_sums(routing_map: Tensor, width: int, valid: Tensor | None) -> Tensor:
    """Return [3]: tokens, and sums of the active FFN width and its square; experts are `width` wide each."""
    active = routing_map.sum(-1, dtype=torch.float64) * width
    return _sums(valid, active, active.square())


def aux_sums(routing_map: Tensor, aux_map: Tensor, scores: Tensor, valid: Tensor | None) -> Tensor:
    """Return AUX_FIELDS and then [E] sums over tokens of the normalized scores.

    Args:
        routing_map: bool [T, E], the dispatched assignments, which are counted.
        aux_map: bool [T, E], the aux loss's map; dispatched assignments that it doesn't have are counted.
        scores: [T, E], the aux loss's normalized scores, 0 at padding.
        valid: bool [T] or None for all.
    """
    kernels = _kernels(scores)
    if kernels:
        return kernels.aux_sums(routing_map, aux_map, scores, valid)
    differs = (routing_map & ~aux_map).sum(-1)
    return torch.cat([_sums(valid, routing_map.sum(-1), differs)[1:], scores.sum(0, dtype=torch.float64)])


def expert_row_sums(output: Tensor, probs: Tensor | None, tokens_per_expert: Tensor) -> Tensor:
    """Return float64 [2, E_local]: per expert its rows, and the sum over them of mean(y^2), the weights divided out.

    Args:
        output: [R, H], rows in expert order as the experts return them, already times `probs`.
        probs: [R] mixing weights, None where the weights are not in the output.
        tokens_per_expert: int [E_local], on the device or still on the host (nothing waits for the device then);
            rows beyond its sum, and rows of weight 0, are padding.

    One pass over `output` with fp32 accumulation within a row and nothing of its size kept.
    """
    kernels = _kernels(output)
    if kernels:
        return kernels.expert_row_sums(output, probs, tokens_per_expert)
    rows = torch.linalg.vector_norm(output, dim=-1, dtype=torch.float32).double().square() / output.shape[-1]
    real = torch.ones_like(rows, dtype=torch.bool)
    if probs is not None:
        weights = probs.double().reshape(-1)
        real = weights != 0
        rows = rows / torch.where(real, weights, 1.0).square()
    ends = tokens_per_expert.to(output.device, non_blocking=True).cumsum(0)
    owner = torch.searchsorted(ends, torch.arange(rows.shape[0], device=output.device), right=True)
    sums = torch.zeros(2, ends.shape[0] + 1, dtype=torch.float64, device=output.device)
    sums[0].index_add_(0, owner, real.double())
    sums[1].index_add_(0, owner, torch.where(real, rows, 0.0))
    return sums[:, :-1]


def square_sums(values: Tensor) -> Tensor:
    """Return float64 [2]: the number of elements and the sum of their squares, nothing of its size kept."""
    rows = torch.linalg.vector_norm(values.reshape(-1, values.shape[-1]), dim=-1, dtype=torch.float32)
    count = torch.full((), values.numel(), dtype=torch.float64, device=values.device)
    return torch.stack([count, rows.double().square().sum()])


def source_counts(routing_map: Tensor, labels: Tensor, num_labels: int, padding: Tensor | None) -> Tensor:
    """Return int64 [num_labels, E]: assignments by the label of the token's sample.

    Args:
        routing_map: bool [T, E], tokens as [sequence, batch] flattened: token t belongs to sample t % batch.
        labels: int64 [batch]; a label outside 0..num_labels-1 is nobody's and left out.
        num_labels: How many labels there are.
        padding: bool [T], True is padding, or None.
    """
    if padding is not None:
        routing_map = routing_map & ~padding[:, None]
    per_sample = routing_map.reshape(-1, labels.shape[0], routing_map.shape[-1]).sum(0, dtype=torch.int64)
    known = (labels >= 0) & (labels < num_labels)
    counts = torch.zeros(num_labels + 1, routing_map.shape[-1], dtype=torch.int64, device=routing_map.device)
    counts.index_add_(0, torch.where(known, labels, num_labels), per_sample)
    return counts[:-1]


def _kernels(tensor: Tensor) -> ModuleType | None:
    """Return the kernels where work on this tensor goes to them."""
    if not tensor.is_cuda or os.environ.get(KERNELS_VARIABLE) == "torch":
        return None
    from megatron_ext.observe import tally_kernels

    return tally_kernels


def _sums(valid: Tensor | None, *per_token: Tensor) -> Tensor:
    """Return float64 [1 + n]: the number of valid tokens and the sum of each [T] tensor over them."""
    ones = torch.ones_like(per_token[0], dtype=torch.float64)
    values = torch.stack([ones, *(value.double() for value in per_token)])
    return values.sum(-1) if valid is None else torch.where(valid, values, 0.0).sum(-1)


def _ordered(logits: Tensor, routing_map: Tensor, topk: int) -> Tensor:
    return logits.float().masked_fill(~routing_map, float("-inf")).topk(topk, -1, sorted=True).indices


def _log(n: int) -> float:
    """Return log n, and 1 for n = 1 where every entropy is 0."""
    return math.log(n) if n > 1 else 1.0
