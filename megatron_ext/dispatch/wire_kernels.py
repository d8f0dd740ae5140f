# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels for `wire.py`: weights and expert numbers into the bytes behind the hidden values and out of them, one
launch each.

The numbers follow the weights without a gap, so only 2 bytes of alignment are sure: they are read and written as halves
of 2 bytes, one a number or two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.dispatch.tiles import power_of_two, programs

_ROWS = 128  # rows of a tile


@triton.jit(do_not_specialize=["tokens", "num_rows"])
def _pack_kernel(
    weights,  # [T, K]
    ids,  # [T, K] int64
    out,  # [M, ...] of the weights' dtype
    halves,  # the same memory as int16
    tokens,  # T
    num_rows,  # M
    out_stride,
    half_stride,
    K: tl.constexpr,
    KP: tl.constexpr,
    PARTS: tl.constexpr,  # halves of a number
    START: tl.constexpr,  # of the numbers, in halves
    COUNT: tl.constexpr,  # halves from there to the row's end
    COUNT_P: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    choice = tl.arange(0, KP)[None, :]
    weight = tl.load(weights + row * K + choice, mask=(row < tokens) & (choice < K), other=0.0)
    tl.store(out + row * out_stride + choice, weight, mask=(row < num_rows) & (choice < K))
    half = tl.arange(0, COUNT_P)[None, :]
    number = half // PARTS
    value = tl.load(ids + row * K + number, mask=(row < tokens) & (number < K), other=-1) >> (half % PARTS * 16)
    value = tl.where(number < K, value, 0).to(tl.int16)
    tl.store(halves + row * half_stride + START + half, value, mask=(row < num_rows) & (half < COUNT))


@triton.jit(do_not_specialize=["num_rows", "first"])
def _unpack_kernel(
    packed,  # [M, ...] of the weights' dtype
    halves,  # the same memory as int16
    weights,  # [M, K]
    ids,  # [M, K] int64
    num_rows,  # M
    packed_stride,
    half_stride,
    first,  # the expert that becomes number 0
    K: tl.constexpr,
    KP: tl.constexpr,
    PARTS: tl.constexpr,
    START: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    choice = tl.arange(0, KP)[None, :]
    inside = (row < num_rows) & (choice < K)
    to = row * K + choice
    tl.store(weights + to, tl.load(packed + row * packed_stride + choice, mask=inside), mask=inside)
    at = halves + row * half_stride + START + choice * PARTS
    value = tl.load(at, mask=inside, other=0).to(tl.int64)
    if PARTS == 2:
        value = (tl.load(at + 1, mask=inside, other=0).to(tl.int64) << 16) | (value & 0xFFFF)
    tl.store(ids + to, value - first, mask=inside)


def pack(weights: Tensor, ids: Tensor, meta: Tensor, parts: int) -> None:
    """Write weights [T, K] and ids [T, K] into `meta` [M, bytes] uint8; the rows behind T as empty ones.

    Args:
        weights: Of the wire's dtype.
        ids: int64.
        meta: `RowFormat.meta_view`, written in place.
        parts: Halves of 2 bytes in a number.
    """
    if not len(meta):
        return
    top_k = weights.shape[1]
    start = top_k * weights.element_size() // 2
    out, halves = meta.view(weights.dtype), meta.view(torch.int16)
    count = halves.shape[1] - start
    _pack_kernel[(programs(len(meta), _ROWS),)](
        weights.contiguous(),
        ids.contiguous(),
        out,
        halves,
        len(weights),
        len(meta),
        out.stride(0),
        halves.stride(0),
        K=top_k,
        KP=power_of_two(top_k),
        PARTS=parts,
        START=start,
        COUNT=count,
        COUNT_P=power_of_two(count),
        ROWS=_ROWS,
    )


def unpack(meta: Tensor, dtype: torch.dtype, top_k: int, parts: int, first: int) -> tuple[Tensor, Tensor]:
    """Return weights [M, K] and ids [M, K] int64 of `meta` [M, bytes] uint8, ids counted from `first`."""
    weights = torch.empty(len(meta), top_k, dtype=dtype, device=meta.device)
    ids = torch.empty(len(meta), top_k, dtype=torch.int64, device=meta.device)
    if len(meta):
        packed, halves = meta.view(dtype), meta.view(torch.int16)
        _unpack_kernel[(programs(len(meta), _ROWS),)](
            packed,
            halves,
            weights,
            ids,
            len(meta),
            packed.stride(0),
            halves.stride(0),
            first,
            K=top_k,
            KP=power_of_two(top_k),
            PARTS=parts,
            START=top_k * dtype.itemsize // 2,
            ROWS=_ROWS,
        )
    return weights, ids
