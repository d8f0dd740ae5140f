"""Run two Megatron models on one batch and measure how far apart they are: loss, logits, every layer, every router.

Each model runs once, one after the other, so that only one is in memory. What the first did is kept as a `Trace`; the
second then also runs every layer and every MLP on the first one's input, so that a layer at fault is named and not
all that come after it. B sequences of S tokens, V vocabulary, H hidden, T = B * S, E experts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Batch:
    """Tokens and the next tokens, int64 [B, S] each."""

    tokens: Tensor
    labels: Tensor


@dataclass
class LayerTrace:
    """What one layer of a run took and gave; hidden states are fp32 [S, B, H]."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    output: Tensor = field(default_factory=lambda: torch.empty(0))
    mlp_input: Tensor = field(default_factory=lambda: torch.empty(0))
    mlp_output: Tensor = field(default_factory=lambda: torch.empty(0))
    routing: Tensor | None = None
    logits: Tensor | None = None


@dataclass(frozen=True)
class Trace:
    """One run: mean loss, logits [B, S, V] and every layer by its name (`layer 0`, `mtp 0`)."""

    loss: float
    logits: Tensor
    layers: dict[str, LayerTrace]


@dataclass(frozen=True)
class LayerDifference:
    """How far a layer is from its source: norms of differences over norms of the source's values.

    Attributes:
        layer: Its name.
        moe: Whether the target's layer has experts.
        hidden: Of the hidden states after the layer, in the whole run.
        alone: The same, with the layer fed with the source's input.
        mlp: Of the MLP's output, with the MLP fed with the source's input.
        mlp_scale: The factor on the source's MLP output that fits the target's best.
    """

    layer: str
    moe: bool
    hidden: float
    alone: float
    mlp: float
    mlp_scale: float


@dataclass(frozen=True)
class RouterCounts:
    """What a layer's router did to the batch, as shares of its tokens.

    Attributes:
        layer: Its name.
        tied: Tokens with a chosen expert whose logit (and bias) equals another expert's to the bit.
        twins: Tokens that chose two experts with the same weights to the bit.
        origins: Mean number of the source's experts that a token's choices stem from.
        idle: Experts that no token chose.
    """

    layer: str
    tied: float
    twins: float
    origins: float
    idle: int


@dataclass(frozen=True)
class Differences:
    """All that was measured; losses in nats a token."""

    source_loss: float
    target_loss: float
    logit_max: float
    logit_mean: float
    layers: tuple[LayerDifference, ...]


def run(model: Any, batch: Batch) -> Trace:
    """Run a model on a batch and keep what its layers did."""
    layers: dict[str, LayerTrace] = {}
    position = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    with torch.no_grad(), _watching(model, layers):
        logits = model(batch.tokens, position, None).float()
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    return Trace(float(loss), logits, layers)


def differences(source: Trace, target: Trace, target_model: Any) -> Differences:
    """Measure the target's run against the source's, and each of its layers on the source's input."""
    gap = (target.logits - source.logits).abs()
    found = []
    for name, layer in layers_of(target_model).items():
        old, new = source.layers[name], target.layers[name]
        with torch.no_grad():
            args, kwargs = old.inputs
            alone = _hidden(layer(*args, **kwargs))
            mlp = _whole(layer.mlp(old.mlp_input))
        found.append(LayerDifference(
            layer=name,
            moe=hasattr(layer.mlp, "router"),
            hidden=_relative(new.output, old.output),
            alone=_relative(alone, old.output),
            mlp=_relative(mlp, old.mlp_output),
            mlp_scale=_fit(mlp, old.mlp_output),
        ))
    return Differences(source.loss, target.loss, float(gap.max()), float(gap.mean()), tuple(found))


def layers_of(model: Any) -> dict[str, Any]:
    """Return a GPT's transformer layers by name: `layer N` with N global from 0."""
    return {f"layer {layer.layer_number - 1}": layer for layer in model.decoder.layers}


def router_counts(layer: str, logits: Tensor, routing: Tensor, *, copies: int, same: Sequence[int],
                  bias: Tensor | None) -> RouterCounts:
    """Count ties and twins in one router's choices.

    Args:
        layer: Its name.
        logits: [T, E].
        routing: Which experts each token chose, bool [T, E].
        copies: M; expert j stems from j // M.
        same: For each expert a number that it shares with the experts of the same weights.
        bias: The expert bias [E] that decides with the logits, or None.
    """
    deciding = logits.double() if bias is None else torch.stack([logits.double(), bias.double().expand_as(logits)], -1)
    equal = deciding[:, :, None] == deciding[:, None, :]
    equal = equal if bias is None else equal.all(-1)
    others = equal.sum(-1) > 1
    origins = _chosen_by_class(routing, [index // copies for index in range(logits.shape[1])])
    return RouterCounts(
        layer=layer,
        tied=_share((others & routing).any(-1)),
        twins=_share((_chosen_by_class(routing, same) > 1).any(-1)),
        origins=float((origins > 0).sum(-1).float().mean()),
        idle=int((~routing.any(0)).sum()),
    )


def _chosen_by_class(routing: Tensor, classes: Sequence[int]) -> Tensor:
    """Return how many experts of each class a token chose: [T, classes]."""
    index = torch.tensor(classes)
    return torch.zeros(len(routing), int(index.max()) + 1).index_add_(1, index, routing.float())


def exact_copies(layer: Any, source_logits: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """Return logits and choices [T, M * E] that exact copies would have, by the target layer's own routing."""
    logits = source_logits.repeat_interleave(copies, dim=1)
    with torch.no_grad():
        _, routing = layer.mlp.router.routing(logits)
    return logits, routing.bool()


@contextlib.contextmanager
def _watching(model: Any, layers: dict[str, LayerTrace]) -> Iterator[None]:
    handles = []
    for name, layer in layers_of(model).items():
        trace = layers[name] = LayerTrace()
        handles += [
            layer.register_forward_pre_hook(_keep_inputs(trace), with_kwargs=True),
            layer.register_forward_hook(_keep_output(trace)),
            layer.mlp.register_forward_hook(_keep_mlp(trace)),
        ]
        if hasattr(layer.mlp, "router"):
            handles.append(layer.mlp.router.register_forward_hook(_keep_routing(trace)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep_inputs(trace: LayerTrace) -> Callable[..., None]:
    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.inputs = (tuple(_copy(one) for one in args), {name: _copy(one) for name, one in kwargs.items()})

    return keep


def _keep_output(trace: LayerTrace) -> Callable[..., None]:
    def keep(module: Any, args: Any, output: Any) -> None:
        trace.output = _hidden(output).clone()

    return keep


def _keep_mlp(trace: LayerTrace) -> Callable[..., None]:
    def keep(module: Any, args: Any, output: Any) -> None:
        trace.mlp_input, trace.mlp_output = args[0].clone(), _whole(output).clone()

    return keep


def _keep_routing(trace: LayerTrace) -> Callable[..., None]:
    def keep(module: Any, args: Any, output: Any) -> None:
        hidden = args[0]
        trace.logits = module.gating(hidden).reshape(-1, module.num_experts)
        trace.routing = output[1].bool()

    return keep


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _hidden(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _whole(output: Any) -> Tensor:
    """Return an MLP's output with its bias, which Megatron adds later."""
    if not isinstance(output, tuple):
        return output
    value, bias = output
    return value if bias is None else value + bias


def _relative(new: Tensor, old: Tensor) -> float:
    gap, size = float((new - old).norm()), float(old.norm())
    return gap / size if size else math.inf if gap else 0.0


def _fit(new: Tensor, old: Tensor) -> float:
    size = float(old.pow(2).sum())
    return float((new * old).sum()) / size if size else math.nan


def _share(flags: Tensor) -> float:
    return float(flags.float().mean())
