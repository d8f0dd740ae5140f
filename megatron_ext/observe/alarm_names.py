"""The alarms: names, rules in words, why they matter and the first thing to try. Read through `names.py`.

The rules themselves are in `alarms/`; the words stand here so that the report and the docs need no arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

SYMPTOMS_PAGE = "docs/symptoms.md"


@dataclass(frozen=True)
class AlarmName:
    """One alarm: what raises it, and where the docs say what to do.

    Attributes:
        name: As in `alarms.jsonl` and the log.
        metric: The measure whose value the alarm carries.
        rule: In words, with the default thresholds.
        why: Why it matters, a sentence.
        remedy: The first thing to try, a sentence that names the flag.
        anchor: The entry of docs/symptoms.md.
    """

    name: str
    metric: str
    rule: str
    why: str
    remedy: str
    anchor: str

    @property
    def link(self) -> str:
        """Where the docs speak of it: page and anchor."""
        return f"{SYMPTOMS_PAGE}#{self.anchor}"


_ALARMS = (
    AlarmName(
        "routing_collapse", "max_vio",
        "max_vio over half of its limit E/k - 1 for 20 steps, and not falling",
        "Most tokens go to a few experts; the rest of the model is paid for and not used.",
        "raise --moe-aux-loss-coeff, or turn on --moe-router-enable-expert-bias",
        "routing-collapse",
    ),
    AlarmName(
        "dead_expert", "dead_share",
        "an expert got no token in the window, or its output norm is below 0.05 of the layer's median "
        "while it gets tokens",
        "The expert learns nothing or says nothing; its parameters are lost.",
        "raise --moe-aux-loss-coeff or --moe-router-bias-update-rate; if its output is 0, look at its "
        "weights and learning rate",
        "dead-expert",
    ),
    AlarmName(
        "rogue_expert", "expert_norm_max_over_median",
        "expert_norm_max_over_median over 10 and twice its value 100 steps ago",
        "One expert's output grows without end while the loss is still flat.",
        "clamp the activation (--activation-func-clamp-value), lower --clip-grad or the learning rate; go "
        "back to a checkpoint before it began",
        "rogue-expert",
    ),
    AlarmName(
        "flat_gate", "max1_over_max2",
        "max1_over_max2 under 1.05",
        "The chosen experts are averaged with equal weights, so choosing teaches the router nothing.",
        "check the gate's scale: try --moe-router-score-function softmax, or lower --moe-z-loss-coeff",
        "flat-gate",
    ),
    AlarmName(
        "sharp_gate", "top_weight",
        "top_weight over 0.95",
        "Only the first of the k chosen experts counts; the others are computed for nothing.",
        "turn on --moe-z-loss-coeff 1e-3, or lower --moe-router-topk",
        "sharp-gate",
    ),
    AlarmName(
        "logit_drift", "z_rms",
        "z_rms rising over 100 steps with a bf16 router, or flip_rate over 1 %",
        "Large logits are coarse in bf16: rounding starts to choose the experts.",
        "--moe-router-dtype fp32, then --moe-z-loss-coeff 1e-3",
        "logit-drift",
    ),
    AlarmName(
        "loss_spike", "lm_loss",
        "lm_loss more than 0.1 above the lowest so far, or not finite",
        "The model is losing what it has learned.",
        "look at the other alarms of the same step first; then a lower learning rate or --clip-grad",
        "loss-spike",
    ),
    AlarmName(
        "overloaded_rank", "rank_max_vio",
        "rank_max_vio over 0.5 for 20 steps",
        "The other GPUs of the expert-parallel group wait for the busiest one.",
        "balance within the micro-batch (--moe-router-load-balancing-type aux_loss) or spread the hot "
        "experts over ranks (`megatron-moe place`)",
        "overloaded-rank",
    ),
    AlarmName(
        "slow_step", "forced_even_ratio",
        "throughput under 85 % of the forced-even control",
        "The step is slower than this hardware allows.",
        "imbalance: see overloaded-rank; transport: run the all-to-all baseline of `megatron-moe "
        "preflight`",
        "slow-step",
    ),
    AlarmName(
        "blind_loss", "max_vio",
        "load-balancing loss within 2 % of 1 while max_vio is over 1",
        "The loss reads even because the probabilities are flat; the load is not.",
        "watch max_vio, not the loss; balance with --moe-router-enable-expert-bias",
        "blind-loss",
    ),
    AlarmName(
        "outlier_rank", "sniff_outliers",
        "a rank is off the median by more than 10 % in Megatron's GPU sniff test (--gpu-sniff-test-interval)",
        "Every step waits for the slowest GPU and link.",
        "stop, take that node out (sbatch --exclude=NODE), and run `megatron-moe preflight` on it",
        "outlier-rank",
    ),
)  # fmt: skip

ALARMS: dict[str, AlarmName] = {alarm.name: alarm for alarm in _ALARMS}


def alarm_table() -> str:
    """Return the docs table of the alarms, in the order of ALARMS."""
    rows = ["| alarm | rule | why it matters | first thing to try |", "|---|---|---|---|"]
    rows += [
        f"| [`{alarm.name}`](#{alarm.anchor}) | {alarm.rule} | {alarm.why} | {alarm.remedy} |"
        for alarm in ALARMS.values()
    ]
    return "\n".join(rows) + "\n"
