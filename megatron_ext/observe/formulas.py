"""The formulas of METRICS on plain arrays: counts, sums and per-token values in, numbers out. No torch.

The live monitor calls them on reduced sums, the offline readers on dumped values. Shapes: L layers, E experts, k
experts a token, T tokens. Leading axes broadcast; NaN says "no value", never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def max_vio(load: NDArray) -> Floats:
    """Return max / mean - 1 over the last axis, [..., E] or [..., ranks] assignments; NaN where all are 0."""
    mean = np.asarray(load, np.float64).mean(-1)
    return np.divide(np.max(load, -1), mean, out=np.full(mean.shape, np.nan), where=mean > 0) - 1.0


def rank_loads(tokens_per_expert: Ints, num_ranks: int) -> Ints:
    """Return [..., num_ranks]: the sum over each rank's experts, which are consecutive in [..., E]."""
    return tokens_per_expert.reshape(*tokens_per_expert.shape[:-1], num_ranks, -1).sum(-1)


def load_cv(tokens_per_expert: NDArray) -> Floats:
    """Return the (population) standard deviation over the mean of [..., E]; NaN where all are 0."""
    load = np.asarray(tokens_per_expert, np.float64)
    mean = load.mean(-1)
    return np.divide(load.std(-1), mean, out=np.full(mean.shape, np.nan), where=mean > 0)


def normalized_entropy(weights: NDArray) -> Floats:
    """Return the entropy of [..., n] non-negative weights over log n: 1 even, 0 all on one; NaN if all are 0."""
    weights = np.asarray(weights, np.float64)
    total = weights.sum(-1, keepdims=True)
    share = np.divide(weights, total, out=np.full(weights.shape, np.nan), where=total > 0)
    plogp = share * np.log(np.where(share > 0, share, 1.0))
    return -plogp.sum(-1) / np.log(weights.shape[-1])


def dead_share(tokens_per_expert: NDArray) -> Floats:
    """Return the share of experts without a token, [..., E] counts of the window."""
    return (np.asarray(tokens_per_expert) == 0).mean(-1)


def drop_share(tokens_per_expert: Ints, tokens: NDArray, topk: int) -> Floats:
    """Return 1 - sum(n_e) / (k * T); `tokens` is T, [...]. Below 0 where experts are padded to capacity."""
    wanted = topk * np.asarray(tokens, np.float64)
    got = tokens_per_expert.sum(-1)
    return 1.0 - np.divide(got, wanted, out=np.full(wanted.shape, np.nan), where=wanted > 0)


def balance_loss(tokens_per_expert: NDArray, probability_sums: NDArray) -> Floats:
    """Return E * sum_e (n_e / sum n) * (P_e / sum P): the load-balancing loss, 1 for an even load.

    `probability_sums` [..., E] holds each expert's sum over tokens of the normalized scores. Also 1 for flat
    probabilities over any load, which is what `blind_loss` looks for.
    """
    load = np.asarray(tokens_per_expert, np.float64)
    probability = np.asarray(probability_sums, np.float64)
    scale = load.sum(-1) * probability.sum(-1)
    product = load.shape[-1] * (load * probability).sum(-1)
    return np.divide(product, scale, out=np.full(scale.shape, np.nan), where=scale > 0)


def mutual_information_bits(joint: NDArray) -> Floats:
    """Return the mutual information in bits of [..., rows, columns] joint counts; NaN where all are 0."""
    joint = np.asarray(joint, np.float64)
    total = joint.sum((-2, -1), keepdims=True)
    p = np.divide(joint, total, out=np.full(joint.shape, np.nan), where=total > 0)
    independent = p.sum(-1, keepdims=True) * p.sum(-2, keepdims=True)
    ratio = np.divide(p, independent, out=np.ones_like(p), where=p > 0)
    return np.maximum((p * np.log2(ratio)).sum((-2, -1)), 0.0)


@dataclass(frozen=True)
class NormRatios:
    """Per layer: [...] arrays, NaN where no expert had a token or the median is 0."""

    max_over_median: Floats
    min_over_median: Floats
    median: Floats


def norm_ratios(expert_rms: Floats) -> NormRatios:
    """Return largest and smallest over the median of [..., E] output RMS; NaN entries (no token) don't count."""
    seen = np.isfinite(expert_rms)
    some = seen.any(-1)
    filled = np.where(some[..., None], expert_rms, 0.0)
    median = np.where(some, np.nanmedian(filled, -1), np.nan)
    usable = np.where(median > 0, median, np.nan)
    return NormRatios(np.nanmax(filled, -1) / usable, np.nanmin(filled, -1) / usable, median)


def mean_over(total: NDArray, count: NDArray) -> Floats:
    """Return total / count elementwise, NaN where count is 0."""
    total = np.asarray(total, np.float64)
    count = np.broadcast_to(np.asarray(count, np.float64), total.shape)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def std_over(total: NDArray, total_of_squares: NDArray, count: NDArray) -> Floats:
    """Return the (population) standard deviation from sums, NaN where count is 0."""
    return np.sqrt(np.maximum(mean_over(total_of_squares, count) - mean_over(total, count) ** 2, 0.0))


def share_of(part: NDArray, rest: NDArray) -> Floats:
    """Return part / (part + rest), NaN where both are 0."""
    return mean_over(part, np.asarray(part, np.float64) + rest)


# Per token, for values read from dumps: [T, E] logits or [T, k] weights.


def logsumexp(logits: Floats) -> Floats:
    """Return log sum exp over the last axis, without overflow."""
    top = logits.max(-1, keepdims=True)
    return (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]


def z_rms(logits: Floats) -> float:
    """Return sqrt(mean over tokens of logsumexp(z)^2) of [T, E] logits."""
    return float(np.sqrt(np.mean(logsumexp(logits) ** 2)))


def router_entropy(logits: Floats) -> float:
    """Return the mean over tokens of H(softmax(z)) / log E of [T, E] logits."""
    return float(normalized_entropy(np.exp(logits - logsumexp(logits)[..., None])).mean())


@dataclass(frozen=True)
class WeightMeasures:
    """What [T, k] mixing weights say, each a mean over tokens (`routed_size_std` a spread)."""

    weight_entropy: float
    top_weight: float
    max1_over_max2: float
    routed_size_mean: float
    routed_size_std: float


def weight_measures(weights: Floats) -> WeightMeasures:
    """Return the measures of [T, k] weights, in any order within a row; k = 1 leaves two of them NaN."""
    ordered = -np.sort(-np.asarray(weights, np.float64), -1)
    size = np.sqrt((ordered**2).sum(-1))
    several = ordered.shape[-1] > 1
    return WeightMeasures(
        weight_entropy=float(normalized_entropy(ordered).mean()) if several else float("nan"),
        top_weight=float(mean_over(ordered[:, 0], ordered.sum(-1)).mean()),
        max1_over_max2=float(mean_over(ordered[:, 0], ordered[:, 1]).mean()) if several else float("nan"),
        routed_size_mean=float(size.mean()),
        routed_size_std=float(size.std()),
    )


def step_noise(values: Floats) -> float:
    """Return the spread of a series from step to step, whatever its trend; [N], N > 1.

    Three in four differences of two normal values of spread s are below 1.627 s; a spike isn't among them.
    """
    return float(np.quantile(np.abs(np.diff(values)), 0.75)) / 1.627


def shortened(values: NDArray, digits: int = 4) -> list[Any]:
    """Return an array as nested lists ready for JSON: so many significant digits, None for what isn't finite."""
    values = np.asarray(values, np.float64)
    usable = np.isfinite(values) & (values != 0)
    power = digits - 1 - np.floor(np.log10(np.abs(np.where(usable, values, 1.0)))).astype(np.int64)
    # Times and over whole powers of ten, exact up to 10^22: the result is then the double nearest to the decimal.
    up, down = 10.0 ** np.clip(power, 0, 300), 10.0 ** np.clip(-power, 0, 300)
    rounded = np.where(usable, np.rint(values * up / down) / up * down, values)
    return np.where(np.isfinite(values), rounded, None).tolist()  # type: ignore[call-overload]
