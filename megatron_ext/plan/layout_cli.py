"""`megatron-moe plan layout -- MEGATRON FLAGS`: over how many ranks should the experts lie?"""

from __future__ import annotations

import json
from argparse import REMAINDER, ArgumentParser, Namespace
from dataclasses import asdict

from megatron_ext.errors import UserError
from megatron_ext.plan import dispatch
from megatron_ext.plan.layout import EVIDENCE, MIN_ROWS, Layout, Plan, first, layouts, straddling
from megatron_ext.plan.memory_cli import GPU_MIB, SPARE, run_from_flags
from megatron_ext.usage import Parser

MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
# Seen on H200s (docs/measurements.md: reserved over allocated).
ALLOCATOR = (
    "With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True the allocator held 1 to 2 % more than the peak on H200s, "
    "without it up to 17 %."
)
# What is counted for dispatchers whose rows are not simulated.
STAND_IN = "dedup"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of the subject."""
    parser.add_argument("--ranks", type=int, required=True, help="GPUs of the run")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs a node (default 8)")
    parser.add_argument("--gpu-mib", type=float, default=GPU_MIB,
                        help=f"memory of the card (default {GPU_MIB}: H200); {SPARE:.0%} of it are left free")
    parser.add_argument("--vocab", type=int, help="tokens of the tokenizer, where --vocab-size is not among the flags")
    parser.add_argument("--rank-load", type=float, metavar="X", help="rows of the fullest rank over the mean where "
                        "experts lie on several ranks (default: as a learned router's first steps had it; 1 where the "
                        "routing is forced even)")  # fmt: skip
    parser.add_argument("--min-rows", type=float, default=MIN_ROWS, metavar="ROWS",
                        help=f"rows that an expert should get of a micro-batch (default {MIN_ROWS}: a rule of thumb)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("flags", nargs=REMAINDER, metavar="-- MEGATRON FLAGS")


def run(args: Namespace) -> int:
    """Print the layouts; 1 where the memory is modelled and none fits."""
    flags = args.flags[1:] if args.flags[:1] == ["--"] else args.flags
    plan, notes = plan_from_flags(flags, args)
    found, left_out = layouts(plan), straddling(plan)
    chosen = first(found, args.min_rows)
    if left_out:
        notes.append(f"Left out, since their groups would lie across nodes unevenly: expert parallel {left_out}.")
    if chosen and (chosen.most or 0) > chosen.micro_batch:
        multiple = (chosen.most or 0) * args.ranks
        notes.append(f"Micro-batch {chosen.most} fits too, at a global batch that is a multiple of {multiple}.")
    advice = _advice(chosen, plan, args.min_rows)
    if args.json:
        print(json.dumps({"layouts": [asdict(one) for one in found], "first": asdict(chosen) if chosen else None,
                          "advice": advice, "notes": notes, "left_out": left_out, "limit_mib": plan.limit_mib,
                          "dispatcher": plan.dispatcher}))  # fmt: skip
    else:
        _print(plan, found, chosen)
        print("\n".join([*notes, advice]))
    return 0 if chosen or plan.model_ranks > 1 else 1


def plan_from_flags(flags: list[str], args: Namespace) -> tuple[Plan, list[str]]:
    """Read a Megatron command line; return what stays the same in every layout, and sentences about it.

    Raises:
        UserError: A size is missing, or a flag asks for what is not modelled.
    """
    asked, rest = _parser().parse_known_args(flags)
    sizes = {name: getattr(asked, name) for name in MODEL_PARALLEL}
    given = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items() if size != 1)
    for value, flag in ((asked.global_batch_size, "--global-batch-size"),
                        (asked.micro_batch_size or not given, f"--micro-batch-size, which {given} keeps")):  # fmt: skip
        if not value:
            raise UserError("a size is missing", where=flag, remedy="give the flags of the training command",
                            exit_code=64)  # fmt: skip
    tensor = asked.tensor_model_parallel_size
    if (asked.expert_tensor_parallel_size or tensor) != 1:
        raise UserError("this is not modelled", where=f"--tensor-model-parallel-size {tensor}",
                        why="it splits the experts too, unless --expert-tensor-parallel-size is 1",
                        remedy="add --expert-tensor-parallel-size 1", exit_code=64)  # fmt: skip
    load = args.rank_load
    if load is None and asked.moe_router_force_load_balancing:
        load = 1.0
    run = run_from_flags([*rest, "--micro-batch-size", str(asked.micro_batch_size or 1)], ranks=args.ranks,
                         vocab=args.vocab)  # fmt: skip
    kind = asked.moe_token_dispatcher_type
    kind = asked.moe_flex_dispatcher_backend if kind == "flex" else kind
    plan = Plan(
        run, asked.global_batch_size, args.gpu_mib * (1 - SPARE), args.gpus_per_node,
        dispatcher=kind if kind in dispatch.NAMES else STAND_IN, groups=asked.moe_router_num_groups or 0,
        group_top_k=asked.moe_router_group_topk or 0,
        model_ranks=tensor * asked.pipeline_model_parallel_size * asked.context_parallel_size,
        pipeline=asked.pipeline_model_parallel_size, rank_load=load,
    )  # fmt: skip
    recompute = run.recompute if isinstance(run.recompute, str) else " ".join(run.recompute)
    notes = [f"Varied: expert parallel and micro-batch. Kept as given: {given + ', ' if given else ''}global batch "
             f"{plan.global_batch}, dispatcher {kind}, recompute {recompute or 'none'}, all other flags."]  # fmt: skip
    if kind not in dispatch.NAMES:
        notes.append(f"What {kind} sends is not simulated; the bytes are those of {plan.dispatcher}.")
    if plan.model_ranks == 1:
        if load is None:
            notes.append("Load: rows of the fullest rank over the mean, as a learned router's first steps had it; "
                         "--rank-load takes yours.")  # fmt: skip
        notes.append(f"{SPARE:.0%} of the card stay free. {ALLOCATOR}")
    return plan, notes


def _parser() -> ArgumentParser:
    """A parser of the flags that a layout varies or needs beside those of the memory's estimate."""
    parser = Parser(prog="megatron-moe plan layout", add_help=False, allow_abbrev=False)
    for name in MODEL_PARALLEL:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=1)
    for name in ("expert-tensor-parallel-size", "expert-model-parallel-size", "micro-batch-size", "global-batch-size",
                 "moe-router-num-groups", "moe-router-group-topk"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--moe-token-dispatcher-type", default="allgather")
    parser.add_argument("--moe-flex-dispatcher-backend", default="deepep")
    parser.add_argument("--moe-router-force-load-balancing", action="store_true")
    return parser


def _advice(chosen: Layout | None, plan: Plan, min_rows: float) -> str:
    """One sentence: what to try first, by which rule, and how little is known."""
    if plan.model_ranks > 1:
        return ("Memory is not modelled under tensor, pipeline or context parallelism, so none is named first: measure "
                "two steps of each, smaller expert-parallel sizes before larger ones.")  # fmt: skip
    if not chosen:
        return f"None fits into {plan.limit_mib:,.0f} MiB, even at micro-batch 1: recompute more, or take more ranks."
    words = f"--expert-model-parallel-size {chosen.expert_parallel} --micro-batch-size {chosen.micro_batch}"
    if chosen.expert_parallel == 1:
        words += " --moe-token-dispatcher-type alltoall"
    if chosen.expert_data_parallel > 1:
        words += " --overlap-grad-reduce"
        words += " --overlap-param-gather" if plan.run.distributed_optimizer else ""
    if chosen.expert_rows >= min_rows:
        rule = f"it is the smallest size that fits with {min_rows:,.0f} rows an expert and micro-batch or more"
    else:
        rule = f"no size that fits gives an expert {min_rows:,.0f} rows a micro-batch, and this one gives the most"
    return (f"Try first {words}: {rule}, and experts on fewer ranks mean less to send and to wait for; the only "
            f"evidence is that {EVIDENCE}, and between nodes nothing was measured, so time its neighbours "
            "too.")  # fmt: skip


def _print(plan: Plan, found: list[Layout], chosen: Layout | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "EP", "expert\nDP", "micro-\nbatch", "most\nthat fits", "load", "peak,\nMiB", "rows an\nexpert",
        "KiB a token\nin the node", "KiB a token\noff the node", "GiB a step:\ntokens", "experts'\nweights",
        "other\nweights",
        title=f"{plan.run.ranks} ranks, {plan.gpus_per_node} a node, global batch {plan.global_batch}; "
        f"{plan.limit_mib:,.0f} MiB are usable",
        caption=f"KiB: all layers, {plan.dispatcher}'s dispatch and combine, forward and backward, routing even. GiB: "
        "what a GPU sends; of weights their gradients and new values.",
        box=SIMPLE_HEAD,
    )  # fmt: skip
    for one in found:
        table.add_row(
            str(one.expert_parallel), str(one.expert_data_parallel),
            "none" if one.fits is False else str(one.micro_batch), "-" if one.most is None else str(one.most),
            "-" if one.peak_mib is None else f"{one.rank_load:.2f}",
            *("-" if value is None else f"{value:,.0f}" for value in (
                one.peak_mib, one.expert_rows, one.in_node_bytes / 2**10, one.off_node_bytes / 2**10)),
            *("-" if sent is None else f"{sent / 2**30:,.1f}" for sent in (
                one.exchange_bytes, one.expert_bytes, one.dense_bytes)),
            style="bold" if one is chosen else None,
        )  # fmt: skip
    Console(width=120).print(table)
