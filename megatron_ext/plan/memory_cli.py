"""`megatron-moe plan memory -- MEGATRON FLAGS`: does this training command fit?"""

from __future__ import annotations

import json
from argparse import REMAINDER, ArgumentParser, Namespace
from dataclasses import asdict

from megatron_ext.errors import UserError
from megatron_ext.plan.memory import Estimate, Run, estimate, learned_rank_load
from megatron_ext.plan.parameters import ModelShape
from megatron_ext.runtime import preset
from megatron_ext.upcycle.flags import moe_layers, parse_layer_freq
from megatron_ext.usage import Parser, nearest, real, whole

# As `nvidia-smi` gives it for an H200.
GPU_MIB = 143771
# CUDA's and NCCL's own memory, and what the allocator cannot use between blocks.
SPARE = 0.04
# How like a flag of the estimate no other flag of Megatron's is: the nearest is at 0.88.
LIKE = 0.9
# Flags under which a rank holds something else than the formulas say, and the value under which it does not.
NOT_MODELLED = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "mtp_num_layers": 0,
    "moe_latent_size": 0,
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of the subject."""
    parser.add_argument("--ranks", type=whole(), default=1, help="GPUs of the run (default 1)")
    parser.add_argument("--vocab", type=whole(), help="tokens of the tokenizer, where the flags lack --vocab-size")
    parser.add_argument(
        "--rank-load", type=real(low=1), default=1.0, metavar="X",
        help="rows of the fullest rank over the mean, for experts on several ranks (default 1: even routing)",
    )  # fmt: skip
    parser.add_argument("--gpu-mib", type=real(above=0), default=GPU_MIB, help=f"the card's (default {GPU_MIB}: H200)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("flags", nargs=REMAINDER, metavar="-- MEGATRON FLAGS")


def run(args: Namespace) -> int:
    """Print the estimate; 1 where it does not fit."""
    flags = args.flags[1:] if args.flags[:1] == ["--"] else args.flags
    planned = run_from_flags(flags, ranks=args.ranks, vocab=args.vocab, rank_load=args.rank_load)
    found = estimate(planned)
    limit = args.gpu_mib * (1 - SPARE)
    if args.json:
        print(json.dumps({**asdict(found), "total": found.total, "limit": limit, "fits": found.total <= limit}))
    else:
        _print(planned, found, limit)
    return 0 if found.total <= limit else 1


def run_from_flags(flags: list[str], *, ranks: int, vocab: int | None = None, rank_load: float = 1.0) -> Run:
    """Read a Megatron command line.

    Raises:
        UserError: A size is missing, or a flag asks for what is not modelled.
    """
    added = preset.flags_for(preset.chosen(flags), "cuda", flags)
    asked, others = _parser().parse_known_args([*flags, *(word for flag in added for word in flag.words)])
    _refuse_misspelt(others)
    for name, plain in NOT_MODELLED.items():
        if (getattr(asked, name) or plain) != plain:
            raise UserError(
                "this is not modelled",
                where=f"--{name.replace('_', '-')} {getattr(asked, name)}",
                why="the estimate knows data and expert parallelism only",
                remedy="leave the flag out of the estimate, or measure two steps",
                exit_code=64,
            )
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"):
        _need(getattr(asked, name), f"--{name.replace('_', '-')}")
    if not asked.bf16:
        raise UserError("this is not modelled", where="no --bf16", why="the estimate is for bf16",
                        remedy="measure two steps", exit_code=64)  # fmt: skip
    return Run(
        shape=_shape(asked, vocab),
        sequence=asked.seq_length,
        micro_batch=asked.micro_batch_size,
        ranks=ranks,
        expert_parallel=asked.expert_model_parallel_size,
        distributed_optimizer=asked.use_distributed_optimizer,
        gradient_bytes=2 if asked.grad_reduce_in_bf16 else 4,
        recompute=_recompute(asked),
        recompute_layers=asked.recompute_num_layers or 1,
        cross_entropy="te" if asked.cross_entropy_loss_fusion and asked.cross_entropy_fusion_impl == "te" else "native",
        rank_load=rank_load,
    )


def _refuse_misspelt(others: list[str]) -> None:
    """Refuse a flag that is all but one of those that count: left out, it would make a wrong estimate in silence."""
    known = _parser()._option_string_actions
    for word in others:
        near = nearest(word.partition("=")[0], known, LIKE) if word.startswith("--") else []
        if near:
            raise UserError("this is not a flag of Megatron's", where=word, remedy=f"did you mean {near[0]}?",
                            exit_code=64)  # fmt: skip


def _parser() -> ArgumentParser:
    """A parser of the flags that matter, with Megatron's names and defaults."""
    parser = Parser(prog="megatron-moe plan memory", add_help=False, allow_abbrev=False)
    for name in (
        "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "kv-channels",
        "seq-length", "micro-batch-size", "vocab-size", "num-experts", "moe-ffn-hidden-size", "recompute-num-layers",
        "moe-shared-expert-intermediate-size", *(name.replace("_", "-") for name in NOT_MODELLED),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=whole(0))
    parser.add_argument("--expert-model-parallel-size", type=whole(), default=1)
    parser.add_argument("--moe-router-topk", type=whole(), default=2)
    parser.add_argument("--make-vocab-size-divisible-by", type=whole(), default=128)
    parser.add_argument("--moe-layer-freq", default="1")
    parser.add_argument("--normalization", default="LayerNorm")
    parser.add_argument("--tokenizer-type")
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--recompute-modules", nargs="*", default=["core_attn"])
    parser.add_argument("--cross-entropy-fusion-impl", default="native")
    for name in (
        "swiglu", "bf16", "use-distributed-optimizer", "grad-reduce-in-bf16", "cross-entropy-loss-fusion",
        "untie-embeddings-and-output-weights", "group-query-attention", "disable-bias-linear", "recompute-activations",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    return parser


def _shape(asked: Namespace, vocab: int | None) -> ModelShape:
    tokens = vocab or _need(asked.vocab_size, "--vocab-size (or --vocab)")
    if vocab is None and asked.tokenizer_type == "NullTokenizer":
        tokens += 1  # its end of document
    step = asked.make_vocab_size_divisible_by
    chosen = moe_layers(parse_layer_freq(asked.moe_layer_freq), asked.num_layers) if asked.num_experts else ()
    ffn = asked.ffn_hidden_size or 4 * asked.hidden_size
    return ModelShape(
        num_layers=asked.num_layers,
        hidden=asked.hidden_size,
        ffn=ffn,
        heads=asked.num_attention_heads,
        vocab=-(-tokens // step) * step,
        query_groups=(asked.num_query_groups or 0) if asked.group_query_attention else 0,
        channels=asked.kv_channels or 0,
        gated=asked.swiglu,
        biases=not asked.disable_bias_linear,
        norm_biases=asked.normalization == "LayerNorm",
        tied=not asked.untie_embeddings_and_output_weights,
        num_experts=asked.num_experts or 0,
        moe_ffn=(asked.moe_ffn_hidden_size or ffn) if asked.num_experts else 0,
        topk=asked.moe_router_topk if asked.num_experts else 0,
        moe_layers=sum(chosen),
        shared_ffn=(asked.moe_shared_expert_intermediate_size or 0) if asked.num_experts else 0,
    )


def _recompute(asked: Namespace) -> str | tuple[str, ...]:
    if asked.recompute_granularity == "full":
        return "full"
    selective = asked.recompute_granularity == "selective" or asked.recompute_activations
    # Fused attention recomputes its own scores anyway.
    return tuple(module for module in asked.recompute_modules if module != "core_attn") if selective else ""


def _need(value: int | None, flag: str) -> int:
    if value is None:
        raise UserError("a size is missing", where=flag, remedy="give the flags of the training command", exit_code=64)
    return value


def _print(planned: Run, found: Estimate, limit: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("part", "MiB", title=f"peak of the fullest rank, {planned.ranks} rank(s), micro-batch "
                  f"{planned.micro_batch} of {planned.sequence} tokens")  # fmt: skip
    for name, value in asdict(found).items():
        if name != "peak_at_loss":
            table.add_row(name, f"{value:,.0f}")
    table.add_row("all", f"{found.total:,.0f}", style="bold")
    Console(width=100).print(table)
    print(f"{'fits' if found.total <= limit else 'does not fit'}: {limit:,.0f} MiB are usable")
    if not found.peak_at_loss:
        print("The peak is in a layer's backward, not at the loss: take this as a rough figure.")
    if planned.expert_parallel > 1 and planned.rank_load == 1.0:
        load = learned_rank_load(planned.expert_parallel)
        print(f"Even routing; a learned router starts uneven: try --rank-load {load:.2f}.")
