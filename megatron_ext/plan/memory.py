"""Peak GPU memory of a training step, from the command line's numbers alone.

What a rank holds, bf16 training with Transformer Engine's layers, no tensor, pipeline or context parallelism:

    weights      2 bytes each, gradients 4 (2 with --grad-reduce-in-bf16), fp32 copy and Adam's two moments 12 in all
             (Megatron's own `training/theoretical_memory_usage.py`: 18 bytes, or 6 + 12 / data-parallel size with
                 the distributed optimizer; an expert's are split over the ranks that hold the same experts).
             --overlap-grad-reduce and --overlap-param-gather need nothing more: both work in place, in the buffers of
             the gradients and of the weights (Megatron's `core/distributed/param_and_grad_buffer.py`)
    activations  what the backward of each layer needs, a token (below)
    logits       2 V a token, times 1 with TE's cross entropy, which puts the gradient into their place, times 5 with
                 Megatron's native one (bf16, an fp32 copy and its exponentials)
    workspaces   what measured runs had beyond this (`WORKSPACE_MIB`)

All of them are alive when the loss is computed: that is the peak as long as the logits outweigh what one layer's
backward needs beside them, which is said where it is not so. H hidden, q and kv the width of all query heads and of all
key heads, F and f the MLP's and an expert's width, K top-k, E experts. Bytes a token of a layer, gated:

    attention    norm's input and output 4 H; rotated queries, keys, and values 2 q + 4 kv; output 2 q; scales 4 a head
    dense MLP    norm's input and output 4 H; first product 4 F; activation 2 F
    MoE          norm's input and output 4 H; K rows of input 2 H, first product 4 f, activation 2 f, weight 4;
                 router scores, probabilities and maps about 17 an expert
    shared       first product 4 s; activation 2 s

Figures that the formula was held against are in `tests/ext/plan/test_plan_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ext.errors import UserError
from megatron_ext.plan import parameters
from megatron_ext.plan.parameters import ModelShape

MIB = 2**20
# Workspaces of cuBLAS and TE, buffers of the loss and the optimizer: what the dense 8-layer run at micro-batch 8 had
# beyond the other terms on one H200. Eleven other runs had 100 to 1,150.
WORKSPACE_MIB = 845
# What a learned router's first steps add to `rank_load` at expert parallel 2: with it their peaks come out within 1.5 %
# (112,855 to 131,693 MiB, two H200). Inferred from them, so it holds `dedup`'s room for a sixteenth more rows, which
# the formula leaves out.
LEARNED_EXCESS = 0.2
LOGITS_COPIES = {"te": 1, "native": 5}
SELECTIVE = ("layernorm", "moe_act")


@dataclass(frozen=True)
class Run:
    """How a model is trained.

    Attributes:
        shape: The model.
        sequence: Tokens of a sequence.
        micro_batch: Sequences of a micro-batch on each rank.
        ranks: All of them (data parallel).
        expert_parallel: Ranks over which a layer's experts lie.
        distributed_optimizer: The optimizer's state is split over the data-parallel ranks.
        gradient_bytes: Of a gradient in the buffer, 4 or 2.
        recompute: "", "full", or the modules of selective recompute.
        recompute_layers: Layers of a recomputed stretch ("full").
        cross_entropy: "te" or "native".
        rank_load: Rows of the fullest rank over the mean, all layers together: 1 for even routing. It counts only where
            experts lie on several ranks.
    """

    shape: ModelShape
    sequence: int
    micro_batch: int
    ranks: int = 1
    expert_parallel: int = 1
    distributed_optimizer: bool = True
    gradient_bytes: int = 4
    recompute: str | tuple[str, ...] = ""
    recompute_layers: int = 1
    cross_entropy: str = "te"
    rank_load: float = 1.0

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a rank."""
        return self.sequence * self.micro_batch


@dataclass(frozen=True)
class Estimate:
    """MiB of the fullest rank at the peak, part by part.

    Attributes:
        weights: bf16.
        gradients: Their buffer.
        optimizer: fp32 weights and moments.
        activations: Of all layers, as kept for the backward.
        logits: With what the loss makes of them, or what one layer's backward takes if that is more.
        workspaces: `WORKSPACE_MIB`.
        peak_at_loss: Whether the loss is the peak; the estimate is surer there.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    workspaces: float
    peak_at_loss: bool

    @property
    def total(self) -> float:
        """The sum, MiB."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.workspaces


def estimate(run: Run) -> Estimate:
    """Add up the parts of the fullest rank.

    Raises:
        UserError: The numbers do not fit together, or ask for something that is not modelled.
    """
    _check(run)
    common, experts = parameters_of_rank(run)
    sharded = run.distributed_optimizer
    expert_data_parallel = run.ranks // run.expert_parallel
    optimizer = 12 * (common / (run.ranks if sharded else 1) + experts / (expert_data_parallel if sharded else 1))
    kept, layer = _activations(run)
    logits = 2 * run.shape.vocab * LOGITS_COPIES[run.cross_entropy]
    # A recomputed layer lives while its backward runs, and as much again in gradients at most.
    backward = layer if run.recompute == "full" else layer / 2
    return Estimate(
        weights=2 * (common + experts) / MIB,
        gradients=run.gradient_bytes * (common + experts) / MIB,
        optimizer=optimizer / MIB,
        activations=kept * run.tokens / MIB,
        logits=max(logits, backward) * run.tokens / MIB,
        workspaces=WORKSPACE_MIB,
        peak_at_loss=logits >= backward,
    )


def learned_rank_load(expert_parallel: int) -> float:
    """Return `rank_load` as a learned router's first steps had it, over so many ranks.

    Were the loads of E experts independent with the relative variance v, those of ranks of E / EP experts would have
    v * (EP - 1) / E: the excess grows with the root of EP - 1. From `LEARNED_EXCESS` that makes 1.35 at 4 ranks, 1.53
    at 8, 1.77 at 16 and 2.59 at 64; one run's counts gave 1.20, 1.53, 1.81 and 3.32 at most
    (benchmarks/rank_balance.py).
    """
    return 1 + LEARNED_EXCESS * (expert_parallel - 1) ** 0.5


def parameters_of_rank(run: Run) -> tuple[int, int]:
    """Return the weights of a rank: those that every rank has, and those of its experts."""
    shape = run.shape
    if not shape.num_experts:
        return parameters.total(shape), 0
    # Counted as a difference, so that the formula of an expert stands in one place.
    one_more = replace(shape, num_experts=shape.num_experts + 1)
    router = shape.moe_layers * (shape.hidden + shape.biases)
    experts = shape.num_experts * (parameters.total(one_more) - parameters.total(shape) - router)
    return parameters.total(shape) - experts, experts // run.expert_parallel


def _activations(run: Run) -> tuple[float, float]:
    """Return bytes a token: of all layers as kept, and of the largest layer if all of it is kept."""
    shape, modules = run.shape, run.recompute
    hidden = shape.hidden
    attention = _attention(shape)
    moe_layers = shape.moe_layers if shape.num_experts else 0
    load = run.rank_load if run.expert_parallel > 1 else 1.0
    dense = float(attention + 4 * hidden + _mlp(shape, shape.ffn))
    moe = float(attention + 4 * hidden + _mlp(shape, shape.shared_ffn) + 17 * shape.num_experts)
    moe += load * shape.topk * (2 * hidden + _mlp(shape, shape.moe_ffn) + 4)
    largest = max(moe if moe_layers else 0.0, dense if moe_layers < shape.num_layers else 0.0)
    # Behind the layers the last norm keeps its input and output.
    if modules == "full":
        return shape.num_layers / run.recompute_layers * 2 * hidden + 4 * hidden, run.recompute_layers * largest
    if "moe_act" in modules:
        moe -= load * shape.topk * 2 * shape.moe_ffn
    if "layernorm" in modules:
        # The norm before an MoE stands by itself; those before linear layers are part of these and stay.
        moe -= 2 * hidden
    return (shape.num_layers - moe_layers) * dense + moe_layers * moe + 4 * hidden, largest


def _attention(shape: ModelShape) -> int:
    channels = shape.channels or shape.hidden // shape.heads
    queries, keys = shape.heads * channels, (shape.query_groups or shape.heads) * channels
    return 4 * shape.hidden + 2 * queries + 4 * keys + 2 * queries + 4 * shape.heads


def _mlp(shape: ModelShape, width: int) -> int:
    return (4 if shape.gated else 2) * width + 2 * width


def _check(run: Run) -> None:
    parameters.check(run.shape)
    modules = run.recompute if isinstance(run.recompute, tuple) else ()
    unknown = [module for module in modules if module not in SELECTIVE]
    faults = (
        (min(run.sequence, run.micro_batch, run.ranks, run.expert_parallel, run.recompute_layers) < 1,
         "sequence, micro-batch, ranks, expert parallelism", "a size is not positive"),
        (run.ranks % max(1, run.expert_parallel), f"{run.ranks} ranks, expert parallel {run.expert_parallel}",
         "the ranks do not divide into expert-parallel groups"),
        (run.shape.num_experts and run.shape.num_experts % max(1, run.expert_parallel),
         f"{run.shape.num_experts} experts, expert parallel {run.expert_parallel}", "the experts do not divide"),
        (run.rank_load < 1, f"rank load {run.rank_load}", "the fullest rank has at least the mean"),
        (bool(unknown), f"--recompute-modules {' '.join(unknown)}", "what these modules free is not modelled"),
        (run.cross_entropy not in LOGITS_COPIES, f"cross entropy {run.cross_entropy}", "not modelled"),
    )  # fmt: skip
    for bad, where, what in faults:
        if bad:
            raise UserError(what, where=where, remedy="give the values of the training command", exit_code=64)
