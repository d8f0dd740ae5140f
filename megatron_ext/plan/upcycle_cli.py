"""`megatron-moe plan upcycle`: is it worth it, how large is the result?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.plan import parameters
from megatron_ext.plan.parameters import ModelShape
from megatron_ext.plan.upcycle import OLMOE_TOKENS, SPARSE_UPCYCLING_COMPUTE, WORDS, Cost, cost
from megatron_ext.usage import whole

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subject; shapes have Megatron's names, defaults are the handbook's first run."""
    parser.add_argument("--dense", type=Path, metavar="CHECKPOINTS",
                        help="folder of the dense run's checkpoints: gives its shape and tokens")
    parser.add_argument("--dense-tokens", type=tokens, metavar="N", help="that the dense model was trained on, as 500B")
    parser.add_argument("--tokens", type=tokens, required=True, metavar="N", help="that the MoE shall be trained on")
    for name, default, text in (
        ("num-layers", 16, "layers"), ("hidden-size", 2048, "hidden size"), ("ffn-hidden-size", 8192, "dense width"),
        ("num-attention-heads", 32, "heads"), ("num-query-groups", 4, "groups of grouped-query attention"),
        ("vocab-size", 128256, "vocabulary, padded"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=whole(), default=default, help=f"{text} (default {default})")
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true", help="as in the training command")
    parser.add_argument("--num-experts", type=whole(), default=64, help="experts (default 64)")
    parser.add_argument("--router-topk", "--moe-router-topk", dest="topk", type=whole(), default=8,
                        help="experts a token (default 8)")
    parser.add_argument("--moe-ffn-hidden-size", type=whole(), help="width of an expert (default: dense width / top-k)")
    parser.add_argument("--moe-shared-expert-intermediate-size", type=whole(0), default=0, help="shared experts' width")
    parser.add_argument("--moe-layers", type=whole(), help="how many layers become MoE layers (default: all)")
    parser.add_argument("--value-bytes", type=whole(), default=2, help="bytes of a weight on disk (default 2: bf16)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def tokens(text: str) -> float:
    """Read a number of tokens.

    Examples:
        >>> tokens("500B")
        500000000000.0

    Raises:
        ArgumentTypeError: It is no number, or none that is positive and finite.
    """
    words = text.strip().upper()
    unit = words[-1:] if words[-1:] in UNITS else ""
    try:
        number = float(words.removesuffix(unit)) * UNITS[unit]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; write 500B or 5e11") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: the number must be positive and finite")
    return number


def run(args: argparse.Namespace) -> int:
    """Count, compare, print.

    Raises:
        UserError: The dense run's tokens are not known, or the shape cannot be.
    """
    dense, dense_tokens = _from_checkpoint(args.dense) if args.dense else (_from_flags(args), 0.0)
    dense_tokens = args.dense_tokens or dense_tokens
    if not dense_tokens:
        raise UserError("the dense run's tokens are missing", where="--dense-tokens", exit_code=64,
                        remedy="pass --dense-tokens 500B, or --dense with the dense run's checkpoints")
    moe = _moe(dense, args)
    counts = {"dense": parameters.total(dense), "moe": parameters.total(moe), "moe_active": parameters.active(moe)}
    found = cost(dense_tokens=dense_tokens, moe_tokens=args.tokens, dense_active=counts["dense"],
                 moe_active=counts["moe_active"])
    size = parameters.checkpoint_bytes(moe, args.value_bytes)
    if args.json:
        print(json.dumps({"dense": asdict(dense), "moe": asdict(moe), "weights": counts, "checkpoint_bytes": size,
                          "dense_tokens": dense_tokens, "tokens": args.tokens, **asdict(found),
                          "verdict_if_dense_is_trained_for_this": found.pays_with_dense}))
        return 0
    _print(counts, size, dense_tokens, args.tokens, found)
    return 0


def _from_flags(args: argparse.Namespace) -> ModelShape:
    return ModelShape(args.num_layers, args.hidden_size, args.ffn_hidden_size, args.num_attention_heads,
                      args.vocab_size, args.num_query_groups, tied=not args.untie_embeddings_and_output_weights)


def _from_checkpoint(root: Path) -> tuple[ModelShape, float]:
    """Return shape and tokens of the run that saved a checkpoint."""
    # torch is needed to read it, and for nothing else here.
    from megatron_ext.upcycle.source import open_source
    from megatron_ext.upcycle.spec import dense_from_args

    source = open_source(root)
    args, dense = source.args, dense_from_args(source.args)

    def value(name: str, default: Any = 0) -> Any:
        return getattr(args, name, default) or default

    words = source.tensors.get("embedding.word_embeddings.weight")
    shape = ModelShape(
        dense.num_layers, dense.hidden, dense.ffn, args.num_attention_heads,
        vocab=words.shape[0] if words else value("padded_vocab_size"),
        query_groups=value("num_query_groups") if value("group_query_attention", False) else 0,
        channels=value("kv_channels"),
        gated=dense.gated,
        biases=dense.biases,
        norm_biases=value("normalization", "LayerNorm") == "LayerNorm",
        tied="output_layer.weight" not in source.tensors,
    )  # fmt: skip
    return shape, float(value("consumed_train_samples") * value("seq_length"))


def _moe(dense: ModelShape, args: argparse.Namespace) -> ModelShape:
    layers = dense.num_layers if args.moe_layers is None else args.moe_layers
    return replace(dense, num_experts=args.num_experts, topk=args.topk, moe_layers=layers,
                   moe_ffn=args.moe_ffn_hidden_size or dense.ffn // max(args.topk, 1),
                   shared_ffn=args.moe_shared_expert_intermediate_size)


def _print(counts: dict[str, int], size: int, dense_tokens: float, moe_tokens: float, found: Cost) -> None:
    rows = (
        ("dense", f"{_short(counts['dense'])} weights, {_short(dense_tokens)} tokens, {found.dense_flops:.2e} FLOPs"),
        ("MoE", f"{_short(counts['moe'])} weights, {_short(counts['moe_active'])} active, {_short(moe_tokens)} tokens, "
                f"{found.moe_flops:.2e} FLOPs"),
        ("checkpoint", f"{size / 1e9:.2f} GB, weights alone"),
        ("caught up", f"after {_short(found.olmoe_tokens)} tokens as in OLMoE: "
                      f"{OLMOE_TOKENS:.0%} of the dense tokens"),
        ("", f"after {_short(found.sparse_tokens)} tokens as in sparse upcycling: "
             f"{SPARSE_UPCYCLING_COMPUTE:.0%} of the dense compute"),
        ("so", WORDS[found.verdict]),
        ("no dense yet", f"both runs' compute trains an MoE from scratch on {_short(found.scratch_tokens)} tokens: "
                         f"{WORDS[found.pays_with_dense].split(':')[0]}"),
    )  # fmt: skip
    for label, text in rows:
        print(f"{label:<14}{text}")
    print("Sources: arXiv 2409.02060, arXiv 2212.05055. Two cases, no law; docs/upcycling.md.")


def _short(number: float) -> str:
    unit = next((name for name in ("T", "B", "M", "K") if number >= UNITS[name]), "")
    return f"{number / UNITS[unit]:.3g}{unit}"
