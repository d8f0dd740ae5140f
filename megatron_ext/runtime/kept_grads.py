"""What Megatron's optimizers ask of each gradient before a step, kept as long as it holds.

The check of the gradients for NaN waits for the GPU, and from there to the first kernel of the norm the GPU waits for
the host, which goes over all parameters one by one: it cuts each one's part out of `main_grad` (`keep_views`), and asks
whose gradient counts in which norm (`keep_members`, `by_norm`). With every expert's weights that is a thousand tensors;
the answers are the same at each step. Patches core/grad-views and core/norm-members put these into upstream's methods.

Nothing is taken for granted that can change between steps: which parameters there are, which tensor is whose gradient
and where it lies is read anew each time, and one difference sends the whole question to upstream's method. It is
read for all parameters at once, in loops that run in the interpreter, at some 0.2 microseconds a tensor and question.
`benchmarks/optimizer_host.py` times them.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Views:
    """This rank's parts of the model parameters' `main_grad`, as views; all lists are in step."""

    models: list[Tensor]
    sources: list[Tensor]  # main_grad
    places: list[int]  # its address
    views: list[Tensor]

    def hold(self, models: Sequence[Tensor]) -> bool:
        """Return whether the views are still what upstream would cut out for these parameters."""
        if not same(models, self.models):
            return False
        sources = [model.main_grad for model in models]  # type: ignore[attr-defined]
        return same(sources, self.sources) and list(map(Tensor.data_ptr, sources)) == self.places


@dataclass(frozen=True)
class _Members:
    """Of these parameters, those whose gradients count in a norm."""

    params: list[Tensor]
    members: list[Tensor]


@dataclass(frozen=True)
class _Clipped:
    """These parameters by the norm that clips them."""

    params: list[Tensor]
    main: list[Tensor]
    separate: dict[str, list[Tensor]]


_views: weakref.WeakKeyDictionary[Any, _Views] = weakref.WeakKeyDictionary()
# By the name of the norm: None is that of all parameters that have none of their own.
_members: weakref.WeakKeyDictionary[Any, dict[str | None, _Members]] = weakref.WeakKeyDictionary()

_clipped: weakref.WeakKeyDictionary[Any, _Clipped] = weakref.WeakKeyDictionary()


def forget(optimizer: Any) -> None:
    """Throw away what is kept for an optimizer: its next step asks anew, as upstream does at every step."""
    _views.pop(optimizer, None)
    _members.pop(optimizer, None)
    _clipped.pop(optimizer, None)


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two lists hold the same objects in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def keep_views(copy: Callable[[Any], None]) -> Callable[[Any], None]:
    """Keep the views that `_copy_model_grads_to_main_grads` of the distributed optimizer makes the gradients."""

    @functools.wraps(copy)
    def kept(optimizer: Any) -> None:
        views = _views.get(optimizer)
        if views is not None:
            models, mains = _parameters(optimizer)
            if views.hold(models):
                for main, view in zip(mains, views.views, strict=True):
                    main.grad = view
                return
            del _views[optimizer]
        copy(optimizer)
        views = _cut(optimizer)
        if views is not None:
            _views[optimizer] = views

    return kept


def _parameters(optimizer: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the model parameters and their main parameters, in upstream's order."""
    models = chain(*optimizer.model_float16_groups, *optimizer.model_fp32_groups)
    mains = chain(*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups)
    return list(models), list(mains)


def _cut(optimizer: Any) -> _Views | None:
    """Return the views that upstream has just made, None where its gradients are something else (other dtypes)."""
    if optimizer.is_stub_optimizer or optimizer.ddp_config.use_megatron_fsdp:
        return None
    models, mains = _parameters(optimizer)
    # Main parameters are None where the inner optimizer has them (--use-precision-aware-optimizer).
    if not all(main is not None and _is_view(main.grad, model) for model, main in zip(models, mains, strict=True)):
        return None
    sources = [model.main_grad for model in models]  # type: ignore[attr-defined]
    views = [main.grad for main in mains if main.grad is not None]
    return _Views(models, sources, list(map(Tensor.data_ptr, sources)), views)


def _is_view(grad: Tensor | None, model: Any) -> bool:
    """Return whether this is a part of the model parameter's gradient, and not a copy in another dtype."""
    source = getattr(model, "main_grad", None)
    if type(grad) is not Tensor or type(source) is not Tensor or grad.dtype != source.dtype:
        return False
    return grad.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def keep_members(choose: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Keep whose gradients `get_grads_for_grad_norm` chooses, by the name of the norm."""

    @functools.wraps(choose)
    def kept(optimizer: Any, grad_norm_group: str | None = None) -> list[Tensor]:
        params = optimizer.get_parameters()
        norms = _members.setdefault(optimizer, {})
        known = norms.get(grad_norm_group)
        if known is not None and same(params, known.params):
            grads = [param.grad for param in known.members]
            return [grad for grad in grads if grad is not None]
        chosen = choose(optimizer, grad_norm_group)
        members = _chosen_members(params, chosen)
        if members is not None:
            norms[grad_norm_group] = _Members(params, members)
        return chosen

    return kept


def _chosen_members(params: list[Tensor], chosen: list[Tensor]) -> list[Tensor] | None:
    """Return whose gradients these are, None where that is not to be seen: of a parameter without one, for instance."""
    grads = [param.grad for param in params]
    if any(type(grad) not in (Tensor, torch.nn.Parameter) for grad in grads):
        return None
    wanted = set(map(id, chosen))
    members = [param for param, grad in zip(params, grads, strict=True) if id(grad) in wanted]
    return members if same([param.grad for param in members], chosen) else None


def by_norm(optimizer: Any, name: Callable[[Tensor], str | None]) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Return an optimizer's parameters that the main norm clips, and the others by the name of their norm.

    Args:
        optimizer: Megatron's.
        name: Upstream's question: the name of a parameter's norm, None for the main one. A tag, set with the model.
    """
    params = optimizer.get_parameters()
    known = _clipped.get(optimizer)
    if known is None or not same(params, known.params):
        known = _clipped[optimizer] = _Clipped(params, [], {})
        for param in params:
            norm = name(param)
            (known.main if norm is None else known.separate.setdefault(norm, [])).append(param)
    return known.main, known.separate
