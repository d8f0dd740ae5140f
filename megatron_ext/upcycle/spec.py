"""What is wanted of an upcycling, checked before anything is written, and what to expect of the result."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

from megatron_ext.errors import UserError
from megatron_ext.upcycle import router, weights
from megatron_ext.upcycle.router import RouterRule

LayerNames = Literal["te", "local"]


@dataclass(frozen=True)
class Dense:
    """The dense model as its checkpoint's arguments describe it.

    Attributes:
        num_layers: Decoder layers.
        hidden: H.
        ffn: F, the MLP's width.
        gated: The activation has a gate (SwiGLU, GeGLU).
        activation: `swiglu`, `gelu`, `squared_relu`, `geglu`, `quick_geglu`.
        biases: Linear layers have biases.
        names: Layer names of Transformer Engine or of Megatron's local layers.
        init_std: --init-method-std of its run.
    """

    num_layers: int
    hidden: int
    ffn: int
    gated: bool
    activation: str
    biases: bool
    names: LayerNames
    init_std: float


@dataclass(frozen=True)
class MoeSpec:
    """The MoE that is wanted.

    Attributes:
        rule: E, top-k and how the router weighs.
        ffn: f, an expert's width.
        moe_layers: For each decoder layer whether it becomes an MoE layer.
        uniform: All layers are alike to Megatron (--moe-layer-freq is 1), so their tensors are stacked.
        layer_freq: --moe-layer-freq as Megatron's arguments hold it.
        scaling: `exact` (default), `megatron` or `none`.
        router_init: See `router.init_std`.
        seed: For every random number.
        shared_ffn: Width of the shared experts, or None. Their last projection starts at zero.
        shared_gate: --moe-shared-expert-gate.
        expert_bias: --moe-router-enable-expert-bias; starts at zero.
        names: Layer names of the MoE run.
    """

    rule: RouterRule
    ffn: int
    moe_layers: tuple[bool, ...]
    uniform: bool = True
    layer_freq: int | list[int] = 1
    scaling: weights.ScalingName = "exact"
    router_init: router.InitName = "auto"
    seed: int = 1234
    shared_ffn: int | None = None
    shared_gate: bool = False
    expert_bias: bool = False
    names: LayerNames = "te"


@dataclass(frozen=True)
class Expectation:
    """What the first loss of the MoE will be like: `exact`, `close` or `changed`, and why."""

    kind: Literal["exact", "close", "changed"]
    why: str


def dense_from_args(args: Namespace) -> Dense:
    """Read the dense model's shape from a checkpoint's arguments.

    Raises:
        UserError: It is not a dense GPT that can be upcycled.
    """
    _refuse_unknown(args)
    gated = bool(getattr(args, "swiglu", False) or getattr(args, "quick_geglu", False))
    activation = "swiglu" if getattr(args, "swiglu", False) else "gelu"
    activation = "squared_relu" if getattr(args, "squared_relu", False) else activation
    activation = "quick_geglu" if getattr(args, "quick_geglu", False) else activation
    local = getattr(args, "transformer_impl", "transformer_engine") == "local"
    return Dense(
        num_layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        gated=gated,
        activation=activation,
        biases=bool(getattr(args, "add_bias_linear", True)),
        names="local" if local else "te",
        init_std=args.init_method_std,
    )


def granularity(dense: Dense, spec: MoeSpec) -> int:
    """Return G, after checking that the shapes divide.

    Raises:
        UserError: They do not.
    """
    if dense.ffn % spec.ffn:
        raise UserError(
            "the dense MLP cannot be cut into experts of this width",
            where=f"dense width {dense.ffn}, expert width {spec.ffn}",
            remedy=f"use an expert width that divides {dense.ffn}",
        )
    count = dense.ffn // spec.ffn
    if spec.rule.num_experts % count:
        raise UserError(
            "the experts do not hold whole copies of the dense MLP",
            where=f"{spec.rule.num_experts} experts, {count} of them make one copy",
            remedy=f"use a number of experts that is a multiple of {count}",
        )
    return count


def check(dense: Dense, spec: MoeSpec) -> int:
    """Check a whole wish against the dense model and return the granularity.

    Raises:
        UserError: The first thing that cannot work.
    """
    count = granularity(dense, spec)
    router.check_rule(spec.rule, count)
    if len(spec.moe_layers) != dense.num_layers:
        raise UserError(
            "the pattern of MoE layers does not fit the model",
            where=f"{len(spec.moe_layers)} entries for {dense.num_layers} layers",
            remedy="give one entry a layer, or a number",
        )
    if not any(spec.moe_layers):
        raise UserError("no layer would become an MoE layer", where=f"layer pattern {spec.layer_freq}",
                        remedy="mark at least one layer with 1")
    if spec.shared_ffn and dense.biases:
        raise UserError(
            "Megatron's shared experts have no biases",
            where="the dense model has linear biases",
            remedy="leave the shared experts out, or start from a dense model with --disable-bias-linear",
        )
    return count


def scaling(dense: Dense, spec: MoeSpec, count: int) -> weights.Scaling:
    """Return the factors for the chosen scaling."""
    if spec.scaling == "none":
        return weights.Scaling()
    if spec.scaling == "megatron":
        return weights.megatron_scaling(
            count,
            num_experts=spec.rule.num_experts,
            topk=spec.rule.topk,
            pre_softmax=spec.rule.pre_softmax,
            activation=dense.activation,
        )
    return weights.exact_scaling(count, router.total_weight(spec.rule).value)


def router_std(dense: Dense, spec: MoeSpec, count: int) -> float:
    """Return the standard deviation of the new router's rows."""
    return router.init_std(
        spec.router_init,
        weight=router.total_weight(spec.rule),
        granularity=count,
        hidden=dense.hidden,
        normal_std=dense.init_std,
    )


def expectation(dense: Dense, spec: MoeSpec, count: int) -> Expectation:
    """Say how near the MoE's first loss will be to the dense one, and why."""
    factors = scaling(dense, spec, count)
    weight = router.total_weight(spec.rule)
    exact = weights.exact_scaling(count, weight.value)
    if not _same_function(dense, factors, exact):
        return Expectation("changed", f"the scaling {spec.scaling!r} does not preserve a {dense.activation} MLP at "
                           f"granularity {count} and a router weight sum of {weight.value:g}")
    if weight.for_any_router:
        return Expectation("exact", f"a token's {spec.rule.topk} router weights always add up to {weight.value:g}, and "
                           "the last projection is scaled for that")
    if router_std(dense, spec, count) <= router.SMALL_LOGIT_STD and count == 1:
        return Expectation("exact", f"a token's router weights depend on the router here; it starts so near to equal "
                           f"weights that they add up to {weight.value:g} within a few millionths")
    return Expectation("close", f"a token's router weights depend on the router here; they add up to {weight.value:g} "
                       "only for equal weights")


def _same_function(dense: Dense, given: weights.Scaling, exact: weights.Scaling) -> bool:
    def near(a: float, b: float) -> bool:
        return abs(a - b) <= 1e-6 * abs(b)

    if dense.biases and not near(given.fc2_bias, exact.fc2_bias):
        return False
    if near(given.fc1, 1.0):
        return near(given.fc2, exact.fc2)
    # Squared ReLU lets a positive factor through the activation as its square.
    return dense.activation == "squared_relu" and near(given.fc1**2 * given.fc2, exact.fc2)


def _refuse_unknown(args: Namespace) -> None:
    """Refuse models whose MLP is not the plain one that the conversion knows."""
    facts = {
        "num_experts": "it is an MoE already",
        "heterogeneous_layers_config_path": "its layers differ from each other",
        "heterogeneous_layers_config_encoded_json": "its layers differ from each other",
        "multi_latent_attention": "",
        "hybrid_layer_pattern": "it is a hybrid model",
        "hybrid_override_pattern": "it is a hybrid model",
    }
    for name, why in facts.items():
        if why and getattr(args, name, None):
            raise UserError("this checkpoint cannot be upcycled from dense", where=f"{name}={getattr(args, name)}",
                            why=why, remedy="give the checkpoint of a dense GPT model")
