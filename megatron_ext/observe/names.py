"""The names: every metric and alarm with its unit, formula and meaning. The only place that spells them.

The tracker's keys, the report, the alarms and the docs table all come from here. Only the standard library is
imported, so that any room can read it. The alarms' words are next door, in `alarm_names.py`.

Keys, as they stand in `metrics.jsonl` and in the tracker:

    moe/<metric>/layer_<n>   one MoE layer, n from 0 over the whole model; MTP layers count on after the last
    moe/<metric>/max         over the layers; also /min and /mean
    moe/<metric>/max_layer   the layer that /max comes from; also /min_layer
    step/<metric>            one number for the whole step; one of several has a suffix: /max, /rank_<r>

Notation of the formulas, for one MoE layer: T tokens (padding left out), E experts, k experts a token, n_e
assignments to expert e, z logits, w the k mixing weights of a token after renormalizing and scaling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from megatron_ext.observe.alarm_names import ALARMS, SYMPTOMS_PAGE, AlarmName, alarm_table

__all__ = [
    "ALARMS",
    "METRICS",
    "SYMPTOMS_PAGE",
    "AlarmName",
    "Key",
    "Metric",
    "Source",
    "Worse",
    "aggregate_key",
    "alarm_table",
    "layer_key",
    "markdown_table",
    "parse_key",
    "step_key",
]

MOE = "moe"
STEP = "step"
AGGREGATES = ("max", "min", "mean")


class Source(StrEnum):
    """What a metric is computed from; it decides its cost and when it can't be had."""

    MAP = "routing map"
    LOGITS = "logits and weights"
    OUTPUTS = "expert outputs"
    LABELS = "data labels"
    DISPATCH = "dispatch counts"
    STEP = "step"
    OFFLINE = "dumps, offline"


class Worse(StrEnum):
    """The direction in which a metric gets worse."""

    UP = "up"
    DOWN = "down"
    EITHER = "either"
    NONE = "none"


@dataclass(frozen=True)
class Metric:
    """One measure.

    Attributes:
        name: The word in the key.
        title: For a chart or a table's head.
        unit: "" for a ratio or a share from 0 to 1.
        formula: Plain text, in the notation of this module's docstring.
        scope: What one value covers: micro-batch, global batch, window, step, sequence.
        source: What it is computed from.
        meaning: A sentence: what low and high values say.
        worse: The direction in which it gets worse.
        megatron_tag: The tag under which Megatron itself writes this scalar; "" where we do.
    """

    name: str
    title: str
    unit: str
    formula: str
    scope: str
    source: Source
    meaning: str
    worse: Worse = Worse.NONE
    megatron_tag: str = ""

    @property
    def per_layer(self) -> bool:
        """Whether there is one value a MoE layer (else one a step)."""
        return self.source is not Source.STEP


_MAP = (
    Metric(
        "tokens_per_expert", "Tokens per expert", "assignments",
        "n_e", "global batch", Source.MAP,
        "How many assignments each expert got. They sum to k * T.",
    ),
    Metric(
        "max_vio", "MaxVio", "",
        "max(n_e) / mean(n_e) - 1", "global batch", Source.MAP,
        "0: every expert has the same load. 1: the busiest has twice the mean. E/k - 1: every token picks "
        "it.", Worse.UP,
    ),
    Metric(
        "max_vio_micro", "MaxVio, micro-batch mean", "",
        "mean over micro-batches of max(n_e) / mean(n_e) - 1", "micro-batch", Source.MAP,
        "As max_vio, but within the tokens that one expert-parallel group routes at once. Above max_vio "
        "by nature.", Worse.UP,
    ),
    Metric(
        "max_vio_micro_worst", "MaxVio, worst micro-batch", "",
        "max over micro-batches of max(n_e) / mean(n_e) - 1", "micro-batch", Source.MAP,
        "The worst micro-batch of the step: it sets the memory peak.", Worse.UP,
    ),
    Metric(
        "max_vio_sequence", "MaxVio, sequence mean", "",
        "mean over sequences of max(n_e) / mean(n_e) - 1", "sequence", Source.OFFLINE,
        "As max_vio within one sequence; from routing traces only.",
    ),
    Metric(
        "rank_max_vio", "Rank MaxVio", "",
        "mean over micro-batches of max(n_r) / mean(n_r) - 1, n_r = sum of n_e on rank r",
        "micro-batch", Source.MAP,
        "0: every GPU of an expert-parallel group gets the same load. 1: the busiest gets twice the mean "
        "and the others wait.", Worse.UP,
    ),
    Metric(
        "rank_max_vio_worst", "Rank MaxVio, worst micro-batch", "",
        "max over micro-batches of max(n_r) / mean(n_r) - 1", "micro-batch", Source.MAP,
        "The worst micro-batch of the step for its busiest GPU.", Worse.UP,
    ),
    Metric(
        "dead_share", "Dead experts", "",
        "share of experts with n_e = 0 over the window", "window", Source.MAP,
        "0: every expert got a token within the window.", Worse.UP,
    ),
    Metric(
        "load_cv", "Load variation", "",
        "std(n_e) / mean(n_e)", "global batch", Source.MAP,
        "0: even. Unlike max_vio it sees all experts, not only the busiest.", Worse.UP,
    ),
    Metric(
        "load_entropy", "Load entropy", "",
        "H(n_e / sum(n_e)) / log E", "global batch", Source.MAP,
        "1: even. 0: one expert gets everything.", Worse.DOWN,
    ),
    Metric(
        "drop_share", "Dropped assignments", "",
        "1 - sum(n_e) / (k * T)", "global batch", Source.MAP,
        "0 unless a capacity factor drops tokens. Negative where experts are padded to their capacity.",
        Worse.UP,
    ),
    Metric(
        "aux_map_disagreement", "Aux map disagreement", "",
        "share of assignments where the aux loss's top-k differs from the dispatched map",
        "micro-batch", Source.MAP,
        "0: the loss balances what is dispatched. Above 0 with group limits, an expert bias or dropping: "
        "it doesn't.", Worse.UP,
    ),
    Metric(
        "balance_loss", "Load-balancing loss", "",
        "E * sum over experts of (n_e / sum n_e) * mean probability of e", "global batch", Source.LOGITS,
        "1: even, or flat probabilities over any load. Computed whether or not such a loss is trained on.",
        Worse.UP,
    ),
    Metric(
        "bias_spread", "Expert bias spread", "logits",
        "max(bias) - min(bias)", "step", Source.MAP,
        "How far the load-balancing bias has to push. Growing without end: it can't win.", Worse.UP,
    ),
    Metric(
        "bias_mean", "Expert bias mean", "logits",
        "mean(bias)", "step", Source.MAP,
        "A common drift of all biases changes nothing for the choice but costs precision.",
    ),
)  # fmt: skip

_LOGITS = (
    Metric(
        "z_rms", "RMS logsumexp", "logits",
        "sqrt(mean over tokens of logsumexp(z)^2)", "micro-batch", Source.LOGITS,
        "The size of the router's logits; the square is Megatron's z-loss. Rising with a bf16 router: "
        "rounding grows.", Worse.UP,
    ),
    Metric(
        "router_entropy", "Router entropy", "",
        "mean over tokens of H(softmax(z)) / log E", "micro-batch", Source.LOGITS,
        "1: the router has no preference. 0: it is certain of one expert.", Worse.EITHER,
    ),
    Metric(
        "weight_entropy", "Weight entropy", "",
        "mean over tokens of H(w / sum w) / log k", "micro-batch", Source.LOGITS,
        "1: the chosen experts are averaged. 0: one of them dominates.", Worse.EITHER,
    ),
    Metric(
        "top_weight", "Top weight", "",
        "mean over tokens of max(w / sum w)", "micro-batch", Source.LOGITS,
        "1/k: a plain average of the chosen experts. 1: only the first counts. Where a capacity factor left a "
        "token a single expert, it doesn't count.", Worse.EITHER,
    ),
    Metric(
        "max1_over_max2", "Max1/Max2", "",
        "mean over tokens of the largest w over the second largest", "micro-batch", Source.LOGITS,
        "1: a flat gate that averages its experts.", Worse.DOWN,
    ),
    Metric(
        "routed_size_mean", "Routed size", "",
        "mean over tokens of sqrt(sum w^2)", "micro-batch", Source.LOGITS,
        "How large the routed output is, per token, for experts of unit output. Without renormalization "
        "it moves.", Worse.EITHER,
    ),
    Metric(
        "routed_size_std", "Routed size, spread", "",
        "std over tokens of sqrt(sum w^2)", "micro-batch", Source.LOGITS,
        "How much that size differs from token to token.",
    ),
    Metric(
        "flip_rate", "Flip rate", "",
        "share of tokens whose set of experts changes when the logits are recomputed in fp32 from the "
        "same input and the current weights, with the same bias, groups and tie rule",
        "micro-batch", Source.LOGITS,
        "0 for an fp32 router. A bf16 router of a large model was published at 0.027.", Worse.UP,
    ),
    Metric(
        "flip_rate_order", "Flip rate, order", "",
        "as flip_rate, but a changed order counts too", "micro-batch", Source.LOGITS,
        "Above flip_rate by nature.", Worse.UP,
    ),
    Metric(
        "flip_rate_bf16", "Flip rate if bf16", "",
        "share of tokens whose set of experts would change if the router ran in bf16",
        "micro-batch", Source.LOGITS,
        "The counterfactual for an fp32 router: what its precision is worth.",
    ),
)  # fmt: skip

_OUTPUTS = (
    Metric(
        "expert_norm_max_over_median", "Largest expert norm / median", "",
        "max over experts / median of r_e, r_e = RMS of expert e's output over its tokens, before the "
        "weights",
        "micro-batch", Source.OUTPUTS,
        "Near 1: all alike. Rising: a rogue expert.", Worse.UP,
    ),
    Metric(
        "expert_norm_min_over_median", "Smallest expert norm / median", "",
        "min over experts / median of r_e, r_e = RMS of expert e's output over its tokens, before the "
        "weights",
        "micro-batch", Source.OUTPUTS,
        "Near 1: all alike. Near 0: an expert that says nothing.", Worse.DOWN,
    ),
    Metric(
        "expert_norm_median", "Median expert norm", "activation",
        "median over experts of r_e", "micro-batch", Source.OUTPUTS,
        "The size of a typical expert's output, before the weights.",
    ),
    Metric(
        "shared_share", "Shared expert's share", "",
        "|shared| / (|shared| + |routed|), RMS over tokens, shared after its gate, routed after combine "
        "and latent up-projection",
        "micro-batch", Source.OUTPUTS,
        "0.5: both say as much. 1: the routed experts say nothing.", Worse.EITHER,
    ),
    Metric(
        "latent_out_norm", "Latent output norm", "activation",
        "RMS after the latent up-projection", "micro-batch", Source.OUTPUTS,
        "Rising without end: the routed branch blows up.", Worse.UP,
    ),
    Metric(
        "compute_per_token_mean", "Compute per token", "FFN width",
        "mean over tokens of the active FFN width", "micro-batch", Source.OUTPUTS,
        "Constant unless experts differ in size or some compute nothing.",
    ),
    Metric(
        "compute_per_token_std", "Compute per token, spread", "FFN width",
        "std over tokens of the active FFN width", "micro-batch", Source.OUTPUTS,
        "0 where all experts are alike.",
    ),
)  # fmt: skip

_LABELS = (
    Metric(
        "source_information", "Source information", "bits",
        "mutual information of a token's data label and its expert", "global batch", Source.LABELS,
        "0: experts ignore where a token comes from. Rising: they specialize by source.",
    ),
)  # fmt: skip

_STEP = (
    Metric(
        "lm_loss", "Loss", "nats per token",
        "-", "step", Source.STEP,
        "The training loss.", Worse.UP, "lm loss",
    ),
    Metric(
        "grad_norm", "Gradient norm", "",
        "-", "step", Source.STEP,
        "Before clipping.", Worse.UP, "grad-norm",
    ),
    Metric(
        "num_zeros", "Zero gradients", "elements",
        "-", "step", Source.STEP,
        "Gradient elements that are exactly 0.", Worse.NONE, "num-zeros",
    ),
    Metric(
        "params_norm", "Parameter norm", "",
        "-", "step", Source.STEP,
        "Of all weights.", Worse.NONE, "params-norm",
    ),
    Metric(
        "max_attention_logit", "Largest attention logit", "logits",
        "-", "step", Source.STEP,
        "Rising: attention is about to overflow.", Worse.UP, "max_attention_logit",
    ),
    Metric(
        "load_balancing_loss", "Load-balancing loss, trained on", "",
        "E * sum over experts of share of tokens * mean probability", "step", Source.STEP,
        "1 for an even load, but also for flat probabilities over an uneven load.",
        Worse.UP, "load_balancing_loss",
    ),
    Metric(
        "z_loss", "z-loss", "logits^2",
        "z_rms^2", "step", Source.STEP,
        "Its root is z_rms.", Worse.UP, "z_loss",
    ),
    Metric(
        "tflops", "Throughput", "TFLOP/s per GPU",
        "as Megatron counts it", "step", Source.STEP,
        "Model FLOPs a second and GPU.", Worse.DOWN, "throughput",
    ),
    Metric(
        "step_time", "Step time", "s",
        "-", "step", Source.STEP,
        "One training step.", Worse.UP, "iteration-time",
    ),
    Metric(
        "tokens_per_s", "Tokens a second", "tokens/s",
        "global batch * sequence length / step_time", "step", Source.STEP,
        "Of all ranks together.", Worse.DOWN,
    ),
    Metric(
        "gpu_hours", "GPU hours", "h",
        "sum of step_time * ranks", "step", Source.STEP,
        "Since the run began.",
    ),
    Metric(
        "forced_even_ratio", "Of the forced-even control", "",
        "tokens_per_s / the forced-even control's", "step", Source.STEP,
        "1: imbalance costs nothing.", Worse.DOWN,
    ),
    Metric(
        "alarms", "Alarms standing", "alarms",
        "-", "step", Source.STEP,
        "How many alarms stand; alarms.jsonl says which.", Worse.UP,
    ),
    Metric(
        "sniff_outliers", "Outlier ranks", "ranks",
        "ranks off the median in any test of Megatron's GPU sniff test", "step", Source.STEP,
        "0: all GPUs and links alike. Only on steps with a test (--gpu-sniff-test-interval).", Worse.UP,
    ),
    Metric(
        "sniff_off", "Outlier rank's distance", "",
        "|value / median - 1| of the rank's worst test", "step", Source.STEP,
        "0.1: a tenth off the median. Only for outlier ranks.", Worse.UP,
    ),
    Metric(
        "peak_memory", "Peak memory", "bytes",
        "largest allocation so far", "step", Source.STEP,
        "Every rank's, not the mean.", Worse.UP,
    ),
)  # fmt: skip

_DISPATCH = (
    Metric(
        "rows_off_rank", "Rows off the rank", "rows a token",
        "rows sent to other ranks, both hops / T", "step", Source.DISPATCH,
        "Of dedup and twohop, dispatch only; combine moves as many back.",
    ),
    Metric(
        "rows_off_node", "Rows off the node", "rows a token",
        "rows sent to other nodes / T", "step", Source.DISPATCH,
        "What the network between nodes carries, one direction.", Worse.UP,
    ),
    Metric(
        "rows_off_node_needed", "Rows off the node, needed", "rows a token",
        "other nodes with one of the token's experts / T", "step", Source.DISPATCH,
        "The least that any dispatcher can send. Below rows_off_node only in the static form.",
    ),
    Metric(
        "choices_off_node", "Choices off the node", "rows a token",
        "assignments to experts of other nodes / T", "step", Source.DISPATCH,
        "What alltoall would send.",
    ),
    Metric(
        "dispatch_gib_off_node", "Dispatch off the node", "GiB",
        "bytes of all rows sent to other nodes since the last logging step", "step", Source.STEP,
        "Of one expert-parallel group, all layers, dispatch only.", Worse.UP,
    ),
)  # fmt: skip

METRICS: dict[str, Metric] = {
    metric.name: metric for metric in (*_MAP, *_LOGITS, *_OUTPUTS, *_LABELS, *_STEP, *_DISPATCH)
}


_LAYER = re.compile(r"layer_(\d+)")


@dataclass(frozen=True)
class Key:
    """A parsed key: `metric` is a name of METRICS; `layer` or `part` is set, or neither."""

    metric: str
    layer: int | None = None
    part: str = ""


def layer_key(metric: str, layer: int) -> str:
    """Return the key of one layer's value, `layer` counted from 0 over the whole model."""
    return f"{MOE}/{_known(metric)}/layer_{layer}"


def aggregate_key(metric: str, part: str) -> str:
    """Return the key of a value over the layers; `part` is max, min, mean, max_layer or min_layer."""
    return f"{MOE}/{_known(metric)}/{part}"


def step_key(metric: str, part: str = "") -> str:
    """Return the key of a step metric that we write; `part` names one of several values (max, rank_3)."""
    return f"{STEP}/{_known(metric)}" + (f"/{part}" if part else "")


def parse_key(key: str) -> Key | None:
    """Return the parts of a key of ours or of a Megatron tag that METRICS knows, None for any other."""
    if key in _BY_TAG:
        return Key(_BY_TAG[key])
    words = key.split("/")
    if words[0] not in (MOE, STEP) or len(words) not in (2, 3) or words[1] not in METRICS:
        return None
    part = words[2] if len(words) == 3 else ""
    layer = _LAYER.fullmatch(part)
    return Key(words[1], layer=int(layer[1])) if layer else Key(words[1], part=part)


def markdown_table(metrics: Iterable[Metric] | None = None) -> str:
    """Return the table of the docs: one row a metric, in the order of METRICS."""
    rows = ["| metric | formula | unit | scope | from | what it says |", "|---|---|---|---|---|---|"]
    for metric in METRICS.values() if metrics is None else metrics:
        formula = metric.formula.replace("|", "\\|")
        tag = f" (Megatron's `{metric.megatron_tag}`)" if metric.megatron_tag else ""
        rows.append(
            f"| `{metric.name}` | {formula} | {metric.unit or '-'} | {metric.scope} | {metric.source} "
            f"| {metric.meaning}{tag} |"
        )
    return "\n".join(rows) + "\n"


def _known(metric: str) -> str:
    assert metric in METRICS, f"{metric!r} is not in observe/names.py; add it there first"
    return metric


_BY_TAG = {metric.megatron_tag: metric.name for metric in METRICS.values() if metric.megatron_tag}
