"""The flags of `megatron-moe upcycle`, and the wish they add up to."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_ext.errors import UserError
from megatron_ext.upcycle.router import RouterRule
from megatron_ext.upcycle.spec import Dense, MoeSpec


def add_shape_flags(parser: ArgumentParser) -> None:
    """Add the flags that say what the MoE shall look like; they carry Megatron's names where it has them."""
    group = parser.add_argument_group("the MoE (the same values as in the training command)")
    group.add_argument("--num-experts", type=int, metavar="E", help="experts a layer")
    group.add_argument("--router-topk", "--moe-router-topk", dest="topk", type=int, default=2, metavar="K",
                       help="experts a token (default 2)")
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


def spec_from_flags(args: Namespace, dense: Dense) -> MoeSpec:
    """Return the wish.

    Raises:
        UserError: A flag is missing or cannot be read.
    """
    if not args.num_experts or args.num_experts < 1:
        raise UserError("the number of experts is missing", where="--num-experts", remedy="pass --num-experts 8",
                        exit_code=64)
    freq = parse_layer_freq(args.moe_layer_freq)
    names = dense.names
    if args.transformer_impl:
        names = "local" if args.transformer_impl == "local" else "te"
    return MoeSpec(
        rule=RouterRule(
            num_experts=args.num_experts,
            topk=args.topk,
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
