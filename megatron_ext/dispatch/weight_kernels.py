# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels for the weights of `rows.py`: one value a slot, into expert order and back, one launch each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.dispatch.tiles import programs

_BLOCK = 1024


@triton.jit
def _spread_weights_kernel(weights, slots, out, number, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < number, other=-1)
    tl.store(out + slot, tl.load(weights + at, mask=slot >= 0, other=0.0), mask=slot >= 0)


@triton.jit
def _gather_weights_kernel(flat, slots, out, number, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < number, other=-1)
    tl.store(out + at, tl.load(flat + slot, mask=slot >= 0, other=0.0), mask=at < number)


def spread_weights(weights: Tensor, slots: Tensor, out: Tensor) -> None:
    """See `rows.spread_weights`."""
    number = slots.numel()
    grid = (programs(number, _BLOCK),)
    _spread_weights_kernel[grid](weights.contiguous(), slots, out, number, BLOCK=_BLOCK)


def gather_weights(flat: Tensor, slots: Tensor, out: Tensor) -> None:
    """See `rows.gather_weights`."""
    number = slots.numel()
    grid = (programs(number, _BLOCK),)
    _gather_weights_kernel[grid](flat.contiguous(), slots, out, number, BLOCK=_BLOCK)
