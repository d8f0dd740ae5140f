"""The flags of `megatron-moe upcycle`, and the wish they add up to: an MoE from a dense model, or a larger MoE."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_ext.errors import UserError
from megatron_ext.upcycle import grow_spec
from megatron_ext.upcycle.router import RouterRule
from megatron_ext.upcycle.spec import Dense, MoeSpec

DEFAULT_TOPK = 2
DEFAULT_ROUTER_NOISE = 0.01
# Flags that describe what an MoE checkpoint says itself, and flags that have a meaning for an MoE source only.
_DENSE_ONLY = ("moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
               "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
               "moe_router_num_groups", "moe_router_enable_expert_bias", "transformer_impl", "scaling", "router_init")
_MOE_ONLY = ("new_experts", "drop_share", "router_noise", "router_shift", "expert_noise")


def add_shape_flags(parser: ArgumentParser) -> None:
    """Add the flags that say what the MoE shall look like; they carry Megatron's names where it has them."""
    group = parser.add_argument_group("the MoE (the same values as in the training command)")
    group.add_argument("--num-experts", type=int, metavar="E", help="experts a layer")
    group.add_argument("--router-topk", "--moe-router-topk", dest="topk", type=int, metavar="K",
                       help=f"experts a token (default {DEFAULT_TOPK}; from an MoE: as it has)")
    group.add_argument("--moe-ffn-hidden-size", type=int, metavar="F",
                       help="width of an expert (default: the dense width); dense width / F is the granularity")
    group.add_argument("--moe-layer-freq", default="1", metavar="N or [0,1,..]",
                       help="which layers become MoE layers, as Megatron's flag (default 1: all)")
    group.add_argument("--moe-shared-expert-intermediate-size", type=int, metavar="S",
                       help="width of the shared experts; they start with no effect (last projection zero)")
    group.add_argument("--moe-shared-expert-gate", action="store_true", help="the shared experts have a gate")
    group.add_argument("--moe-router-score-function", default="softmax",
                       choices=("softmax", "sigmoid", "sqrtsoftplus"), help="default softmax")
    group.add_argument("--moe-router-pre-softmax", action="store_true", help="softmax before the choice of experts")
    group.add_argument("--moe-router-topk-scaling-factor", type=float, metavar="X",
                       help="what the run multiplies router weights with; the experts are scaled for it")
    group.add_argument("--moe-router-num-groups", type=int, metavar="N", help="groups of group-limited routing")
    group.add_argument("--moe-router-enable-expert-bias", action="store_true", help="the router has an expert bias")
    group.add_argument("--transformer-impl", choices=("transformer_engine", "local"),
                       help="layers of the MoE run (default: as the dense run)")


def add_choice_flags(parser: ArgumentParser) -> None:
    """Add the flags that say how the weights are made."""
    group = parser.add_argument_group("how the weights are made")
    group.add_argument("--scaling", default="exact", choices=("exact", "megatron", "none"),
                       help="exact: scale the last projection alone, for any activation (default); megatron: the same "
                       "factor on every projection, as --moe-use-upcycling does; none: plain slices")
    group.add_argument("--router-init", default="auto", choices=("auto", "normal", "small", "zero"),
                       help="auto: the model's own std where the function stays the same for every router, else so "
                       "small that a token's weights are equal (default)")
    group.add_argument("--seed", type=int, default=1234, help="for the router and everything drawn (default 1234)")
    group.add_argument("--carry-schedule", action="store_true",
                       help="go on with the dense run's iteration and learning-rate schedule (default: a fresh start)")
    group.add_argument("--restart-data", action="store_true",
                       help="read the data from the start again (default: go on where the dense run stopped)")


def add_growth_flags(parser: ArgumentParser) -> None:
    """Add the flags that say how a larger MoE's new experts are made; None means: not given."""
    group = parser.add_argument_group("from an MoE (its own shape stays; --num-experts and --router-topk may grow)")
    group.add_argument("--new-experts", choices=("copy", "drop", "random"),
                       help="copy: the experts again (default); drop: Drop-Upcycling, copies with a share of their "
                       "channels drawn anew; random: as Megatron initializes")
    group.add_argument("--drop-share", type=float, metavar="R",
                       help="with drop: the share of a copy's channels drawn anew (default 0.5)")
    group.add_argument("--router-noise", type=float, metavar="X",
                       help="noise on the copies' router rows, relative to each row (default 0.01; random: 0)")
    group.add_argument("--router-shift", type=float, metavar="X",
                       help="one vector that all rows of a set of copies add, so that a token finds all its experts in "
                       "one set; relative to a row (default 0; try 4, with --router-noise 0)")
    group.add_argument("--expert-noise", type=float, metavar="X",
                       help="noise on the copies' weights, relative to each tensor (default 0)")


def growth_from_flags(args: Namespace, moe: grow_spec.Moe, parser: ArgumentParser) -> grow_spec.Growth:
    """Return the wish for a larger MoE.

    Raises:
        UserError: A flag is missing or does not fit an MoE source.
    """
    _refuse(args, parser, _DENSE_ONLY, "the source is an MoE, and its checkpoint says this itself")
    total = _num_experts(args)
    values = {name: getattr(args, name) for name in _MOE_ONLY if getattr(args, name) is not None}
    if values.get("new_experts", "copy") != "drop" and "drop_share" in values:
        raise UserError("there is nothing to drop", where=f"--drop-share {args.drop_share}",
                        remedy="add --new-experts drop", exit_code=64)
    if values.get("new_experts") != "random":
        values.setdefault("router_noise", DEFAULT_ROUTER_NOISE)
    return grow_spec.Growth(multiple=grow_spec.multiple(moe, total), seed=args.seed,
                            topk=moe.rule.topk if args.topk is None else args.topk, **values)


def _refuse(args: Namespace, parser: ArgumentParser, names: tuple[str, ...], why: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value != parser.get_default(name):
            raise UserError("this flag does not fit this source", where=f"--{name.replace('_', '-')} {value}", why=why,
                            remedy="leave it out", exit_code=64)


def _num_experts(args: Namespace) -> int:
    if not args.num_experts or args.num_experts < 1:
        raise UserError("the number of experts is missing", where="--num-experts", remedy="pass --num-experts 8",
                        exit_code=64)
    return int(args.num_experts)


def spec_from_flags(args: Namespace, dense: Dense, parser: ArgumentParser) -> MoeSpec:
    """Return the wish for an MoE from a dense model.

    Raises:
        UserError: A flag is missing, does not fit a dense source or cannot be read.
    """
    _refuse(args, parser, _MOE_ONLY, "the source is dense; this says how an MoE grows")
    total = _num_experts(args)
    freq = parse_layer_freq(args.moe_layer_freq)
    names = dense.names
    if args.transformer_impl:
        names = "local" if args.transformer_impl == "local" else "te"
    return MoeSpec(
        rule=RouterRule(
            num_experts=total,
            topk=DEFAULT_TOPK if args.topk is None else args.topk,
            score=args.moe_router_score_function,
            pre_softmax=args.moe_router_pre_softmax,
            scaling_factor=args.moe_router_topk_scaling_factor,
            num_groups=args.moe_router_num_groups,
        ),
        ffn=args.moe_ffn_hidden_size or dense.ffn,
        moe_layers=moe_layers(freq, dense.num_layers),
        uniform=freq == 1,
        layer_freq=freq,
        scaling=args.scaling,
        router_init=args.router_init,
        seed=args.seed,
        shared_ffn=args.moe_shared_expert_intermediate_size,
        shared_gate=args.moe_shared_expert_gate,
        expert_bias=args.moe_router_enable_expert_bias,
        names=names,
    )


def parse_layer_freq(text: str | int | list[int]) -> int | list[int]:
    """Read `--moe-layer-freq`: a number N (every N-th layer), or a Python list of 0 and 1 with `*` and `+`.

    Raises:
        UserError: it is neither, or the list has other entries.

    Examples:
        >>> parse_layer_freq("2")
        2
        >>> parse_layer_freq("([0]*1+[1]*3)")
        [0, 1, 1, 1]
    """
    if not isinstance(text, str):
        return text
    words = text.replace(" ", "")
    if words.isdigit() and int(words) > 0:
        return int(words)
    try:
        entries = _expression(words)
    except (ValueError, IndexError) as error:
        raise UserError(
            "the layer pattern cannot be read",
            where=f"--moe-layer-freq {text}",
            remedy="pass a number, or a list such as '[0]*1+[1]*15'",
            exit_code=64,
        ) from error
    if not set(entries) <= {0, 1}:
        raise UserError("the layer pattern has entries other than 0 and 1", where=f"--moe-layer-freq {text}",
                        remedy="1 is an MoE layer, 0 a dense one", exit_code=64)
    return entries


def moe_layers(freq: int | list[int], num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is an MoE layer (as Megatron's gpt_layer_specs.py reads the flag)."""
    if isinstance(freq, int):
        return tuple(number % freq == 0 for number in range(num_layers))
    return tuple(bool(entry) for entry in freq)


def _expression(words: str) -> list[int]:
    """Evaluate sums of lists, each maybe times a number or in brackets, without `eval`."""
    entries: list[int] = []
    depth, start = 0, 0
    for at, letter in enumerate([*words, "+"]):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
        if letter == "+" and depth == 0:
            entries += _term(words[start:at])
            start = at + 1
    return entries


def _term(words: str) -> list[int]:
    if words.startswith("(") and words.endswith(")"):
        return _expression(words[1:-1])
    if words.startswith("("):
        close = words.rindex(")")
        return _expression(words[1:close]) * int(words[close + 1 :].removeprefix("*"))
    close = words.index("]")
    if words[0] != "[":
        raise ValueError(words)
    entries = [int(word) for word in words[1:close].split(",") if word]
    rest = words[close + 1 :]
    return entries * int(rest.removeprefix("*")) if rest else entries
