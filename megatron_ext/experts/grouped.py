"""One linear layer of all local experts, as one grouped matrix product each way.

Shapes: R rows in expert order, E local experts, I inputs and O outputs of the layer. The rows of expert e are
`ends[e - 1]` to `ends[e]`. torch computes each group's product in one launch where it has a kernel (bf16 on Hopper and
later), and in a loop of its own elsewhere (https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grouped_mm.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm


def grouped_linear(rows: Tensor, ends: Tensor, weights: Sequence[Tensor], *, add_to_main_grad: bool) -> Tensor:
    """Return each expert's `rows @ weight.T`, differentiable in the rows and the weights.

    Args:
        rows: [R, I].
        ends: int32 [E] on the device of the rows: where each expert's rows end; the last is R.
        weights: E tensors [O, I] of the dtype of the rows.
        add_to_main_grad: Add the weights' gradients to their `main_grad` in the backward pass, where all have one, and
            say so to Megatron (`grad_added_to_main_grad`), as its own linear layers do.

    Returns:
        [R, O].
    """
    return cast(Tensor, _GroupedLinear.apply(rows, ends, add_to_main_grad, *weights))


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return equal tensors that lie evenly spaced in one storage as one tensor [E, ...], without a copy; else None."""
    first = tensors[0]
    places = [tensor.data_ptr() for tensor in tensors]
    step = (places[1] - places[0]) // first.element_size() if len(places) > 1 else first.numel()
    even = step >= first.numel() and places == list(range(places[0], places[-1] + 1, step * first.element_size()))
    # What lies between two tensors of one storage is of that storage.
    if not even or first.untyped_storage().data_ptr() != tensors[-1].untyped_storage().data_ptr():
        return None
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    return first.detach().as_strided((len(tensors), *first.shape), (step, *first.stride()))


def _together(weights: Sequence[Tensor]) -> Tensor:
    # Megatron's distributed optimizer lays the weights out for the view (see module.py). The copy reads and writes all
    # of the layer's weights, which is little beside the products and much beside nothing.
    one = as_one(weights)
    return torch.stack([weight.detach() for weight in weights]) if one is None else one


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, add_to_main_grad: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends)
        # Not saved: `main_grad` is an attribute of the parameter object, which a saved tensor need not return.
        ctx.weights, ctx.add_to_main_grad = weights, add_to_main_grad
        if not rows.shape[0]:
            return rows.new_empty(0, weights[0].shape[0])
        return grouped_mm(rows, _together(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, ends = ctx.saved_tensors
        weights, empty = ctx.weights, not rows.shape[0]
        grad, grad_rows = grad.contiguous(), None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.empty_like(rows) if empty else grouped_mm(grad, _together(weights), offs=ends)
        if not any(ctx.needs_input_grad[3:]):
            return grad_rows, None, None, *(None for _ in weights)
        if empty:
            products = grad.new_zeros(len(weights), *weights[0].shape)
        else:
            products = _without_garbage(grouped_mm(grad.t(), rows, offs=ends), ends)
        if ctx.add_to_main_grad and all(hasattr(weight, "main_grad") for weight in weights):
            return grad_rows, None, None, *_add_to_main_grad(weights, products)
        return grad_rows, None, None, *products.unbind()


def _without_garbage(products: Tensor, ends: Tensor) -> Tensor:
    """Return the weight gradients [E, O, I] with zeros for experts without rows.

    Hopper's kernel writes them; Blackwell's leaves what was in memory (github.com/pytorch/pytorch/issues/172439).
    """
    if not products.is_cuda or torch.cuda.get_device_capability(products.device)[0] < 10:
        return products
    counts = ends.diff(prepend=ends.new_zeros(1))
    return torch.where((counts > 0)[:, None, None], products, 0)


def _add_to_main_grad(weights: Sequence[Tensor], products: Tensor) -> list[Tensor]:
    """Add to each `main_grad`, in one call where they lie in a row; return what autograd shall take for gradients."""
    parameters: Sequence[Any] = weights
    one = as_one([parameter.main_grad for parameter in parameters])
    if one is not None:
        one.add_(products)
    else:
        for parameter, product in zip(parameters, products.unbind(), strict=True):
            parameter.main_grad.add_(product)
    stand_in = _zeros(weights[0].shape, weights[0].dtype, weights[0].device)
    for parameter in parameters:
        parameter.grad_added_to_main_grad = True
    # DDP's hooks run only where a gradient arrives. They don't read it, and drop it at once; autograd takes a tensor of
    # its own without a copy.
    return [stand_in.detach() for _ in weights]


_stand_ins: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    key = (shape, dtype, device)
    if key not in _stand_ins:
        _stand_ins[key] = torch.zeros(shape, dtype=dtype, device=device)
    return _stand_ins[key]
