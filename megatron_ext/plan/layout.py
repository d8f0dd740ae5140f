"""Over how many ranks should the experts lie? Every expert-parallel size that is possible, with what it costs.

A larger size leaves a rank fewer experts: less memory, fewer gradients once a step. In exchange tokens travel, and a
layer waits for the rank whose experts got most of them. Nothing is timed: memory is `plan.memory`'s, rows that travel
are `plan.dispatch`'s for even routing, and `first` is a rule with one measurement behind it (`EVIDENCE`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_ext.errors import UserError
from megatron_ext.plan import dispatch, memory

EVIDENCE = (
    "one model (16 layers, 64 experts, top-8) on two H200 of one host trained at 449 TFLOP/s a GPU with expert "
    "parallel 1 and micro-batch 6, at 415 with 2 and 8"
)
# A rule of thumb, not measured: five times the rows at which an H200 reads an expert's weights as long as it multiplies
# (989 TFLOP/s over 4.8 TB/s by its data sheet, 2 bytes and 2 operations a weight and row: 206). The runs of `EVIDENCE`
# had 3,072 rows an expert and 8,192.
MIN_ROWS = 1024


@dataclass(frozen=True)
class Plan:
    """What stays the same in every layout.

    Attributes:
        run: The training run; its micro-batch, expert parallelism and rank load are varied.
        global_batch: Sequences of a step.
        limit_mib: What a GPU may hold.
        gpus_per_node: Ranks of a node, in a row as launchers place them.
        dispatcher: One of `dispatch.NAMES`.
        groups: Of group-limited routing (0: none).
        group_top_k: Groups that a token may use.
        model_ranks: Tensor, pipeline and context parallel sizes multiplied: ranks of one copy of the model.
        pipeline: Pipeline stages; a layer's experts lie within one.
        rank_load: Of every size above 1; None: as a learned router's first steps had it (`memory.learned_rank_load`).
    """

    run: memory.Run
    global_batch: int
    limit_mib: float
    gpus_per_node: int = 8
    dispatcher: str = "dedup"
    groups: int = 0
    group_top_k: int = 0
    model_ranks: int = 1
    pipeline: int = 1
    rank_load: float | None = None

    @property
    def micro_batches(self) -> list[int]:
        """Micro-batches that divide a rank's share of the global batch, ascending."""
        share = self.global_batch // (self.run.ranks // self.model_ranks)
        return [size for size in range(1, share + 1) if share % size == 0]


@dataclass(frozen=True)
class Layout:
    """One expert-parallel size at its largest micro-batch.

    Attributes:
        expert_parallel: Ranks over which a layer's experts lie.
        expert_data_parallel: Ranks that hold the same experts.
        fits: Whether a micro-batch fits; None where the memory is not modelled (tensor, pipeline, context parallel).
        micro_batch: The largest that divides the global batch and fits; 1 where none fits; the command's own where the
            memory is not modelled.
        most: The largest that fits, whether it divides or not: 0 where none does; None where memory is not modelled.
        rank_load: That the peak was estimated with.
        peak_mib: Of the fullest rank at `micro_batch`, or None.
        expert_rows: Rows an expert gets of a micro-batch, on average.
        in_node_bytes: What a token sends to other GPUs of its node: all layers, dispatch and combine, both passes.
        off_node_bytes: The same to other nodes.
        exchange_bytes: Both, a GPU and step.
        expert_bytes: A GPU sends a step to reduce its experts' gradients and gather their weights, or None.
        dense_bytes: The same of all other weights, or None.
    """

    expert_parallel: int
    expert_data_parallel: int
    fits: bool | None
    micro_batch: int
    most: int | None
    rank_load: float
    peak_mib: float | None
    expert_rows: float
    in_node_bytes: float
    off_node_bytes: float
    exchange_bytes: float
    expert_bytes: float | None
    dense_bytes: float | None


def layouts(plan: Plan) -> list[Layout]:
    """Return every layout that experts, ranks and nodes allow, by ascending expert-parallel size.

    Raises:
        UserError: The numbers do not fit together, or the estimate of the memory does not know something.
    """
    _check(plan)
    return [_layout(plan, size) for size in _sizes(plan) if _in_a_node(plan, size)]


def straddling(plan: Plan) -> list[int]:
    """Return the expert-parallel sizes left out because their groups neither fill nodes nor divide one."""
    return [size for size in _sizes(plan) if not _in_a_node(plan, size)]


def first(found: Iterable[Layout], min_rows: float = MIN_ROWS) -> Layout | None:
    """Return what to try first: the smallest expert-parallel size that fits and gives each expert `min_rows` rows.

    Where none gives so many, the one that gives the most. None where none fits, or where that is not known.
    """
    fitting = [one for one in found if one.fits]
    fed = [one for one in fitting if one.expert_rows >= min_rows]
    if fed:
        return min(fed, key=lambda one: one.expert_parallel)
    return max(fitting, key=lambda one: one.expert_rows, default=None)


def _sizes(plan: Plan) -> list[int]:
    # Megatron forms the expert groups within a pipeline stage, over its tensor, context and data-parallel ranks.
    stage = plan.run.ranks // plan.pipeline
    return [size for size in range(1, stage + 1) if stage % size == 0 and plan.run.shape.num_experts % size == 0]


def _in_a_node(plan: Plan, size: int) -> int:
    """Return how many ranks of a group lie in one node, 0 where that differs from group to group."""
    per_node = min(plan.gpus_per_node, plan.run.ranks)
    if per_node % size == 0:
        return size
    return per_node if size % per_node == 0 else 0


def _layout(plan: Plan, size: int) -> Layout:
    load = memory.learned_rank_load(size) if plan.rank_load is None else plan.rank_load
    run = replace(plan.run, expert_parallel=size, rank_load=load)
    modelled = plan.model_ranks == 1
    most = _most(plan, run) if modelled else None
    fitting = [micro_batch for micro_batch in plan.micro_batches if micro_batch <= (most or 0)]
    if modelled:
        run = replace(run, micro_batch=max(fitting, default=1))
    in_node, off_node = _exchange(plan, run)
    common, experts = memory.parameters_of_rank(run)
    # Tensor and context parallelism leave a rank a part of its micro-batch's tokens.
    tokens = size * run.tokens * plan.pipeline / plan.model_ranks
    held = run.ranks // plan.pipeline // size
    return Layout(
        expert_parallel=size,
        expert_data_parallel=held,
        fits=bool(fitting) if modelled else None,
        micro_batch=run.micro_batch,
        most=most,
        rank_load=load,
        peak_mib=memory.estimate(run).total if modelled else None,
        expert_rows=tokens * run.shape.topk / run.shape.num_experts,
        in_node_bytes=in_node,
        off_node_bytes=off_node,
        exchange_bytes=(in_node + off_node) * run.sequence * plan.global_batch / run.ranks,
        expert_bytes=_sync(run, experts, held) if modelled else None,
        dense_bytes=_sync(run, common, run.ranks) if modelled else None,
    )


def _most(plan: Plan, run: memory.Run) -> int:
    """Return the largest micro-batch that fits; it need not divide a rank's share of the global batch."""
    upto = range(1, plan.micro_batches[-1] + 1)
    return bisect_right(upto, plan.limit_mib, key=lambda size: memory.estimate(replace(run, micro_batch=size)).total)


def _exchange(plan: Plan, run: memory.Run) -> tuple[float, float]:
    """Return the bytes that a token sends within the node and off it, on average."""
    shape = run.shape
    layer = dispatch.Layer(shape.num_experts, shape.topk, shape.hidden, run.tokens, groups=plan.groups,
                           group_top_k=plan.group_top_k)  # fmt: skip
    cluster = dispatch.Cluster(run.expert_parallel, _in_a_node(plan, run.expert_parallel))
    rows = next(one for one in dispatch.simulate(layer, cluster) if one.name == plan.dispatcher)
    # Dispatch and combine, forward and backward; a recomputed layer goes through its forward once more.
    ways = 6 if run.recompute == "full" else 4
    each = ways * shape.moe_layers * shape.hidden * layer.value_bytes
    return (rows.rows_off_rank - rows.rows_off_node) * each, rows.rows_off_node * each


def _sync(run: memory.Run, weights: int, ranks: int) -> float:
    """Return the bytes that a rank sends a step for weights that `ranks` ranks hold.

    A ring sends (n - 1) / n of a buffer once for a reduce-scatter or an all-gather, twice for an all-reduce.
    """
    each = run.gradient_bytes + 2 if run.distributed_optimizer else 2 * run.gradient_bytes
    return each * weights * (ranks - 1) / ranks


def _check(plan: Plan) -> None:
    run, model = plan.run, max(1, plan.model_ranks)
    copies = run.ranks // model
    faults = (
        (not run.shape.num_experts, "no --num-experts", "the model has no experts to spread"),
        (min(plan.model_ranks, plan.pipeline, plan.gpus_per_node, plan.global_batch, run.ranks) < 1,
         f"--ranks {run.ranks}, --gpus-per-node {plan.gpus_per_node}, --global-batch-size {plan.global_batch}, "
         "tensor, pipeline, context parallel", "a size is not positive"),
        (run.ranks % model, f"--ranks {run.ranks}, tensor times pipeline times context parallel {model}",
         "the ranks do not divide into copies of the model"),
        (run.ranks > plan.gpus_per_node > 0 and run.ranks % plan.gpus_per_node,
         f"--ranks {run.ranks}, --gpus-per-node {plan.gpus_per_node}", "the ranks do not fill whole nodes"),
        (copies and plan.global_batch % copies,
         f"--global-batch-size {plan.global_batch}, {copies} data-parallel ranks",
         "the global batch does not divide over the data-parallel ranks"),
        (plan.model_ranks > 1 and copies and plan.global_batch % (copies * run.micro_batch),
         f"--global-batch-size {plan.global_batch}, {copies} data-parallel ranks, --micro-batch-size {run.micro_batch}",
         "the micro-batches do not divide the global batch"),
        (plan.dispatcher not in dispatch.NAMES, f"dispatcher {plan.dispatcher}", "its rows are not simulated"),
    )  # fmt: skip
    for bad, where, what in faults:
        if bad:
            raise UserError(what, where=where, remedy="give the values of the training command", exit_code=64)
