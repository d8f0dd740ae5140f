"""Hold an upcycled checkpoint against its source: weights, function and routing, each against what the options promise.

Three questions, in this order. Is every weight what the options make of the source (`survey`)? Do both models give the
same on one batch, as far as the options promise it (`compare`)? Do the routers tell the experts apart? The answers
add up to a verdict with reasons.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_ext.errors import UserError
from megatron_ext.upcycle import compare, grow, grow_spec, model, offline, weights
from megatron_ext.upcycle import spec as specs
from megatron_ext.upcycle.compare import Batch, Differences, RouterCounts, Trace
from megatron_ext.upcycle.router import RouterRule, total_weight
from megatron_ext.upcycle.source import Source, damaged
from megatron_ext.upcycle.survey import Survey, survey
from megatron_ext.upcycle.target import Block, Content

# Bounds for an exact upcycling by the checkpoint's precision: loss in nats, and a layer's own relative difference.
LOSS_BOUND = {torch.float32: 1e-5}
LAYER_BOUND = {torch.float32: 1e-4}
LOSS_BOUND_LOW, LAYER_BOUND_LOW = 1e-3, 1e-2
# Share of the source's loss that a close upcycling may differ by.
CLOSE_SHARE = 0.02
# How far a layer's factor may be from the promised one.
SCALE_BOUND = 1e-2
MAX_REASONS = 8

Kind = Literal["exact", "close", "scaled", "changed"]


@dataclass(frozen=True)
class Promise:
    """What the options promise: a kind, the reason, and for `scaled` the factor on the output of an MoE layer's MLP."""

    kind: Kind
    why: str
    scale: float = 1.0


@dataclass(frozen=True)
class Plan:
    """The upcycling made again: its plan, its arguments, its promise, and M (1 from a dense source)."""

    content: Content
    args: Namespace
    promise: Promise
    copies: int


@dataclass(frozen=True)
class Routing:
    """The routers on the batch: of the source (None where it is dense), of exact copies (likewise), of the target."""

    source: tuple[RouterCounts, ...]
    exact_copies: tuple[RouterCounts, ...]
    target: tuple[RouterCounts, ...]


@dataclass(frozen=True)
class Report:
    """All that was found. `reasons` is empty where everything is as promised."""

    promise: Promise
    survey: Survey
    differences: Differences
    routing: Routing
    loss_bound: float | None
    reasons: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether everything is as promised."""
        return not self.reasons


def make_again(source: Source, target: Source) -> Plan:
    """Plan the upcycling again from the source and the target's `upcycle.json`.

    Raises:
        UserError: The target was not made by an upcycling, or from another kind of source.
    """
    note = _note(target.folder)
    carry = {"carry_schedule": False, "restart_data": False}
    if note.get("kind", offline.DENSE) == grow.GROW:
        _need(bool(getattr(source.args, "num_experts", None)), source, "an MoE", "a dense model")
        moe, growth = grow_spec.moe_from_args(source.args), grow_spec.Growth(**note["growth"])
        expected = grow_spec.expectation(moe, growth)
        return Plan(grow.plan_content(source, moe, growth, **carry), grow.grown_args(source.args, moe, growth),
                    Promise(expected.kind, expected.why), growth.multiple)
    _need(not getattr(source.args, "num_experts", None), source, "a dense model", "an MoE")
    dense, spec = specs.dense_from_args(source.args), _spec(note)
    return Plan(offline.plan_content(source, dense, spec, **carry), offline.moe_args(source.args, spec),
                promise(dense, spec), 1)


def promise(dense: specs.Dense, spec: specs.MoeSpec) -> Promise:
    """Say what an upcycling from dense promises; one that only scales the MLP's output, by how much."""
    count = specs.check(dense, spec)
    expected = specs.expectation(dense, spec, count)
    given, weight = specs.scaling(dense, spec, count), total_weight(spec.rule)
    exact = weights.exact_scaling(count, weight.value)
    power = 2 if dense.activation == "squared_relu" else None
    if expected.kind != "changed" or (given.fc1 != 1 and power is None):
        return Promise(expected.kind, expected.why)
    scale = given.fc1 ** (power or 1) * given.fc2 / exact.fc2
    if dense.biases and not math.isclose(given.fc2_bias / exact.fc2_bias, scale):
        return Promise("changed", expected.why)
    return Promise("scaled", expected.why, scale)


def check_pair(source: Source, target: Source) -> None:
    """Raise UserError (exit code 64) unless the two can be compared at all."""
    if source.folder.resolve() == target.folder.resolve():
        raise UserError("source and target are the same checkpoint", where=str(target.folder),
                        remedy="give the checkpoint before the upcycling and the one after it", exit_code=64)
    if not getattr(target.args, "num_experts", None):
        raise UserError("the target is not an MoE", where=str(target.folder),
                        remedy="give the source first and the MoE second", exit_code=64)
    old, new = model.vocab_size(source), model.vocab_size(target)
    if old != new:
        raise UserError("source and target have different vocabularies", where=f"{old} and {new} rows of "
                        f"{model.EMBEDDING}", remedy="give the source that the target was made from", exit_code=64)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        values = getattr(source.args, name, None), getattr(target.args, name, None)
        if values[0] != values[1]:
            raise UserError("source and target have different shapes", where=f"{name}: {values[0]} and {values[1]}",
                            remedy="give the source that the target was made from", exit_code=64)
    if not torch.equal(source.read(model.EMBEDDING), target.read(model.EMBEDDING)):
        raise UserError(
            "the target does not come from this source, or was trained on since",
            where=f"{model.EMBEDDING} differs between {source.folder} and {target.folder}",
            why="an upcycling copies the embedding",
            remedy="give the source that upcycle.json in the target names, and the target as it was made",
            exit_code=64,
        )


def verify(source: Source, target: Source, batch: Batch, *,
           progress: Callable[[Block], None] = lambda block: None) -> Report:
    """Compare weights, then run both models on the batch; Megatron's groups must exist (`model.one_rank`).

    Raises:
        UserError: The two are not source and target of one upcycling, or cannot be built here.
    """
    check_pair(source, target)
    plan = make_again(source, target)
    found = survey(plan.content, target, progress=progress)
    old = compare.run(model.build(source), batch)
    new_model = model.build(target)
    new = compare.run(new_model, batch)
    gaps = compare.differences(old, new, new_model)
    routing = _routing(plan, found, old, new, new_model)
    return judge(plan.promise, found, gaps, routing, dtype=_dtype(target), other=_argument_reasons(plan.args, target))


def judge(promised: Promise, found: Survey, gaps: Differences, routing: Routing, *, dtype: torch.dtype,
          other: Sequence[str] = ()) -> Report:
    """Hold what was measured against the promise.

    Args:
        promised: From the options.
        found: The weights.
        gaps: The runs.
        routing: The routers.
        dtype: Of the checkpoint's weights; decides how near exact is.
        other: Reasons found elsewhere.
    """
    bound = _loss_bound(promised, gaps, dtype)
    reasons = [*other, *_weight_reasons(found), *_function_reasons(promised, gaps, bound, dtype)]
    return Report(promised, found, gaps, routing, bound, tuple(reasons))


def _argument_reasons(planned: Namespace, target: Source) -> list[str]:
    """Name arguments of the MoE's shape that are not what the options make: training would build another model."""
    return [f"arguments: {name} is {getattr(target.args, name, None)!r}, the options make {value!r}"
            for name, value in sorted(vars(planned).items())
            if name.startswith(("num_experts", "moe_")) and getattr(target.args, name, None) != value]


def _weight_reasons(found: Survey) -> list[str]:
    reasons = [one.text() for one in found.wrong[:MAX_REASONS]]
    if len(found.wrong) > MAX_REASONS:
        reasons.append(f"and {len(found.wrong) - MAX_REASONS} more tensors differ from what the options make")
    for one in found.experts:
        if one.distinct != one.expected_distinct:
            reasons.append(f"{one.layer}: {one.distinct} different experts, the options make {one.expected_distinct}")
        if one.silent:
            reasons.append(f"{one.layer}: {one.silent} experts with an empty or broken projection")
    return reasons


def _function_reasons(promised: Promise, gaps: Differences, bound: float | None, dtype: torch.dtype) -> list[str]:
    reasons = []
    if not math.isfinite(gaps.target_loss):
        reasons.append(f"the target's loss is {gaps.target_loss}")
    gap = abs(gaps.target_loss - gaps.source_loss)
    if bound is not None and gap > bound:
        reasons.append(f"the loss differs by {gap:.3g}, promised: at most {bound:.3g}")
    layer_bound = LAYER_BOUND.get(dtype, LAYER_BOUND_LOW)
    for one in gaps.layers:
        is_off = max(one.alone, one.mlp) > layer_bound
        if is_off and (promised.kind == "exact" or not one.moe):
            reasons.append(f"{one.layer}: on the source's input its output is {one.alone:.2%} off, its MLP's "
                           f"{one.mlp:.2%}; promised: at most {layer_bound:.2%}")
        if promised.kind == "scaled" and one.moe and abs(one.mlp_scale / promised.scale - 1) > SCALE_BOUND:
            reasons.append(f"{one.layer}: its MLP's output is {one.mlp_scale:.4g} times the source's, promised: "
                           f"{promised.scale:.4g} times")
    return reasons


def _loss_bound(promised: Promise, gaps: Differences, dtype: torch.dtype) -> float | None:
    if promised.kind == "exact":
        return LOSS_BOUND.get(dtype, LOSS_BOUND_LOW)
    return CLOSE_SHARE * gaps.source_loss if promised.kind == "close" else None


def _routing(plan: Plan, found: Survey, old: Trace, new: Trace, new_model: Any) -> Routing:
    layers, times = compare.layers_of(new_model), plan.copies
    same = {one.layer: one.same for one in found.experts}
    source, exact, target = [], [], []
    for name, trace in new.layers.items():
        if trace.logits is None or trace.routing is None:
            continue
        bias = getattr(layers[name].mlp.router, "expert_bias", None)
        target.append(compare.router_counts(name, trace.logits, trace.routing, copies=times, same=same[name],
                                            bias=bias))
        before = old.layers[name]
        if before.logits is None or before.routing is None:
            continue
        old_bias = None if bias is None else bias[::times]
        experts = range(before.logits.shape[1])
        source.append(compare.router_counts(name, before.logits, before.routing, copies=1, same=experts,
                                            bias=old_bias))
        logits, routing = compare.exact_copies(layers[name], before.logits, times)
        exact.append(compare.router_counts(
            name, logits, routing, copies=times, same=[one for one in experts for _ in range(times)],
            bias=None if old_bias is None else old_bias.repeat_interleave(times),
        ))
    return Routing(tuple(source), tuple(exact), tuple(target))


def _dtype(source: Source) -> torch.dtype:
    return source.tensor(model.EMBEDDING).dtype


def _note(folder: Path) -> dict[str, Any]:
    path = folder / offline.NOTE
    if not path.is_file():
        raise UserError(
            "the target does not say how it was made",
            where=str(path),
            why="only `megatron-moe upcycle` writes this file; a checkpoint that training saved later has none",
            remedy="verify the folder that `megatron-moe upcycle` wrote, before training",
            exit_code=64,
        )
    try:
        note = json.loads(path.read_text())
    except ValueError as error:
        raise damaged(str(path), str(error)) from error
    if note.get("schema") != 1:
        raise damaged(str(path), f"its schema is {note.get('schema')!r}, not 1")
    return dict(note)


def _spec(note: dict[str, Any]) -> specs.MoeSpec:
    moe = dict(note["moe"])
    return specs.MoeSpec(**{**moe, "rule": RouterRule(**moe["rule"]), "moe_layers": tuple(moe["moe_layers"])})


def _need(fits: bool, source: Source, wanted: str, found: str) -> None:
    if not fits:
        raise UserError("the target was made from another kind of model", where=str(source.folder),
                        why=f"upcycle.json in the target says that it came from {wanted}; this is {found}",
                        remedy="give the source that upcycle.json in the target names", exit_code=64)
