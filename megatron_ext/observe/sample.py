"""One sampled step, reduced over all ranks, as plain arrays: what is emitted and what the alarms look at.

`measure` turns reduced sums into metrics. It is NumPy only; L counts the MoE layers, in the order of `layers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_ext.observe import formulas
from megatron_ext.observe.formulas import Floats, Ints

# The order of the columns in `tally.*_FIELDS`, spelled here without torch.
_TOKENS, _Z_SQUARES, _ROUTER_ENTROPY = range(3)
_FLIP_TOKENS, _FLIPS, _ORDER_FLIPS, _BF16_FLIPS, _UNLIKE = range(5)
_WEIGHTED, _WEIGHT_ENTROPY, _TOP_WEIGHT, _RATIO_TOKENS, _RATIO, _SIZE, _SIZE_SQUARES = range(7)
_ASSIGNMENTS, _AUX_DIFFERS = range(2)


@dataclass(frozen=True)
class Facts:
    """What of the configuration the numbers depend on.

    Attributes:
        topk: Experts a token.
        router_is_fp32: Whether the router computes in fp32 or better.
        may_differ: Whether something besides the logits decides on the map (jitter, dropping), so that a
            recomputed map that is unlike the dispatched one is no fault.
        drops: Whether a capacity factor may drop or pad assignments.
        lost: Metrics that can't be measured in this run.
        sources: The data labels.
    """

    topk: int
    router_is_fp32: bool = True
    may_differ: bool = False
    drops: bool = False
    lost: frozenset[str] = frozenset()
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One sampled step.

    Attributes:
        step: The training step.
        layers: Global layer numbers of the MoE layers.
        tokens_per_expert: int64 [L, E], of this step, over all ranks.
        window_counts: int64 [L, E], since the last sample, this step included.
        values: Per-layer metrics by name, float64 [L], NaN where there is no value.
        expert_rms: float64 [L, E], NaN where an expert had no token, or None.
        busiest_rank: int [L], the expert-parallel rank with the highest load, or None.
        tokens_per_source: int64 [L, sources, E] or None.
        step_values: Metrics of the whole step by key.
        topk: Experts a token.
        router_is_fp32: Whether rounding of the router's logits is no concern.
    """

    step: int
    layers: tuple[int, ...]
    tokens_per_expert: Ints
    window_counts: Ints
    values: Mapping[str, Floats]
    expert_rms: Floats | None = None
    busiest_rank: NDArray[np.int64] | None = None
    tokens_per_source: Ints | None = None
    step_values: Mapping[str, float] = field(default_factory=dict)
    topk: int = 1
    router_is_fp32: bool = True

    @property
    def num_experts(self) -> int:
        """Return E, 0 for a dense model."""
        return self.tokens_per_expert.shape[-1]


class InvariantError(AssertionError):
    """Counts that can't be: the sum over the experts isn't k * T."""


def measure(step: int, layers: tuple[int, ...], sums: Mapping[str, NDArray], facts: Facts) -> Sample:
    """Return the metrics of reduced sums (`Store.unpack`), with the rows of `layers` only.

    Raises:
        InvariantError: sum n_e isn't k * T although nothing drops or pads.
    """
    rows = np.array(layers, np.int64)
    part = {name: sums[name][rows] for name in _BY_ROW}
    counts = part["step_counts"]
    tokens = part["tokens"]
    if not facts.drops:
        _check_invariant(counts, tokens, facts.topk, layers)
    micro = sums["micro"][:, :, :, rows]
    rms = _expert_rms(part["experts"])
    values = {
        **_of_counts(counts, tokens, facts),
        **_of_micro_batches(micro, counts.shape[-1]),
        **_of_logits(part, facts),
        **_of_weights(part, facts),
        **_of_outputs(part, rms),
    }
    kept = {name: value for name, value in values.items() if name not in facts.lost and np.isfinite(value).any()}
    by_source = part["source_counts"]
    return Sample(
        step=step,
        layers=layers,
        tokens_per_expert=counts,
        window_counts=part["window_counts"] + counts,
        values=kept,
        expert_rms=rms if np.isfinite(rms).any() else None,
        busiest_rank=micro[..., 1].sum((0, 2)).argmax(0) if micro.any() else None,
        tokens_per_source=by_source if by_source.any() else None,
        topk=facts.topk,
        router_is_fp32=facts.router_is_fp32,
    )


_BY_ROW = (
    "step_counts",
    "window_counts",
    "tokens",
    "source_counts",
    "logits",
    "flips",
    "weights",
    "gate",
    "aux",
    "probabilities",
    "widths",
    "experts",
    "shared",
    "routed",
    "latent",
    "bias",
)


def _check_invariant(counts: Ints, tokens: Ints, topk: int, layers: tuple[int, ...]) -> None:
    wrong = np.flatnonzero((counts.sum(-1) != topk * tokens) & (tokens > 0))
    if wrong.size:
        at = wrong[0]
        raise InvariantError(
            f"layer {layers[at]}: {counts[at].sum()} assignments, but top-{topk} of {tokens[at]} tokens"
        )


def _of_counts(counts: Ints, tokens: Ints, facts: Facts) -> dict[str, Floats]:
    values = {
        "max_vio": formulas.max_vio(counts),
        "load_cv": formulas.load_cv(counts),
        "load_entropy": formulas.normalized_entropy(counts),
    }
    if facts.drops:
        values["drop_share"] = formulas.drop_share(counts, tokens, facts.topk)
    return values


def _of_micro_batches(micro: Ints, experts: int) -> dict[str, Floats]:
    """From [replicas, EP ranks, micro-batches, L, 2]: within each EP group's micro-batch, then mean and max."""
    busiest = micro[..., 0].max(1)
    load = np.moveaxis(micro[..., 1], 1, -1)
    total = load.sum(-1)
    vio = formulas.mean_over(busiest * experts, total) - 1.0
    rank_vio = formulas.max_vio(load)
    return {
        "max_vio_micro": _mean(vio),
        "max_vio_micro_worst": _max(vio),
        "rank_max_vio": _mean(rank_vio),
        "rank_max_vio_worst": _max(rank_vio),
    }


def _of_logits(part: Mapping[str, NDArray], facts: Facts) -> dict[str, Floats]:
    logits, flips, aux = part["logits"], part["flips"], part["aux"]
    values = {
        "z_rms": np.sqrt(formulas.mean_over(logits[:, _Z_SQUARES], logits[:, _TOKENS])),
        "router_entropy": formulas.mean_over(logits[:, _ROUTER_ENTROPY], logits[:, _TOKENS]),
        "balance_loss": formulas.balance_loss(part["step_counts"], part["probabilities"]),
        "aux_map_disagreement": formulas.mean_over(aux[:, _AUX_DIFFERS], aux[:, _ASSIGNMENTS]),
        "bias_spread": formulas.mean_over(part["bias"][:, 1], part["bias"][:, 0]),
        "bias_mean": formulas.mean_over(part["bias"][:, 2], part["bias"][:, 0]),
    }
    # Where something unknown decides on the map, what rounding would do to the logits says nothing about the run.
    unlike = formulas.mean_over(flips[:, _UNLIKE], flips[:, _FLIP_TOKENS]) > 0
    tokens = np.where(unlike & (not facts.may_differ), 0.0, flips[:, _FLIP_TOKENS])
    values["flip_rate"] = formulas.mean_over(flips[:, _FLIPS], tokens)
    values["flip_rate_order"] = formulas.mean_over(flips[:, _ORDER_FLIPS], tokens)
    if facts.router_is_fp32:
        values["flip_rate_bf16"] = formulas.mean_over(flips[:, _BF16_FLIPS], tokens)
    return values


def _of_weights(part: Mapping[str, NDArray], facts: Facts) -> dict[str, Floats]:
    w, widths = part["weights"], part["widths"]
    tokens = w[:, _WEIGHTED]
    # The gate between several experts: of one there is none. A saturated gate's second weight may well be exactly 0.
    gate = part["gate"] if facts.drops else w
    several = gate[:, _WEIGHTED] if facts.topk > 1 else np.zeros(len(gate))
    return {
        "weight_entropy": formulas.mean_over(gate[:, _WEIGHT_ENTROPY], several),
        "top_weight": formulas.mean_over(gate[:, _TOP_WEIGHT], several),
        "max1_over_max2": formulas.mean_over(gate[:, _RATIO], gate[:, _RATIO_TOKENS]),
        "routed_size_mean": formulas.mean_over(w[:, _SIZE], tokens),
        "routed_size_std": formulas.std_over(w[:, _SIZE], w[:, _SIZE_SQUARES], tokens),
        "compute_per_token_mean": formulas.mean_over(widths[:, 1], widths[:, 0]),
        "compute_per_token_std": formulas.std_over(widths[:, 1], widths[:, 2], widths[:, 0]),
    }


def _of_outputs(part: Mapping[str, NDArray], rms: Floats) -> dict[str, Floats]:
    ratios = formulas.norm_ratios(rms)
    shared, routed, latent = (_rms(part[name]) for name in ("shared", "routed", "latent"))
    return {
        "expert_norm_max_over_median": ratios.max_over_median,
        "expert_norm_min_over_median": ratios.min_over_median,
        "expert_norm_median": ratios.median,
        "shared_share": formulas.share_of(shared, routed),
        "latent_out_norm": latent,
        "source_information": formulas.mutual_information_bits(part["source_counts"])
        if part["source_counts"].size
        else np.full(len(rms), np.nan),
    }


def _expert_rms(experts: Floats) -> Floats:
    """From [L, 2, E] rows and sums of mean squares to [L, E] RMS."""
    return np.sqrt(formulas.mean_over(experts[:, 1], experts[:, 0]))


def _rms(sums: Floats) -> Floats:
    return np.sqrt(formulas.mean_over(sums[:, 1], sums[:, 0]))


def _mean(values: Floats) -> Floats:
    """Mean of [replicas, micro-batches, L] over the first two, NaN (no such micro-batch) left out."""
    seen = np.isfinite(values)
    return formulas.mean_over(np.where(seen, values, 0.0).sum((0, 1)), seen.sum((0, 1)))


def _max(values: Floats) -> Floats:
    highest = np.where(np.isfinite(values), values, -np.inf).max((0, 1))
    return np.where(np.isfinite(highest), highest, np.nan)
