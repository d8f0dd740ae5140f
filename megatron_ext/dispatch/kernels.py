# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels for `rows.py`: `spread_rows` (each row is read once and written to its slots) and `sum_rows` (each
row's copies are read, added in fp32 in column order, and written once).

Both move whole rows of a few KiB; the goal is the speed of a copy. A program of `spread_rows` takes one row; one of
`sum_rows` takes as many rows as have `Tile.copies` copies: with two copies a row, one row would leave too few loads in
flight to hide the way from slot to row. Row strides are passed in units of 16 bytes where they are multiples of it, so
that the compiler sees the alignment and loads 16 bytes a thread even when a packed row is no power of two.
`benchmarks/dispatch_kernels.py` measures them against a copy.

Numbers of rows are not specialized on, here and in the other kernels (but where whole vectors depend on it): with
expert parallelism they change every micro-batch, and one more form would be compiled amid training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.dispatch.tiles import power_of_two, programs

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class Tile:
    """How a row is cut.

    Args:
        block_bytes: Bytes of a row that one pass of a program covers.
        num_warps: Warps of a program.
        copies: Copies that a program of `sum_rows` reads in one pass; at least those of one row.
    """

    block_bytes: int
    num_warps: int
    copies: int = 8


# Found by benchmarks/dispatch_kernels.py --tune.
SPREAD_TILE = Tile(block_bytes=8192, num_warps=8)
SUM_TILE = Tile(block_bytes=2048, num_warps=4)


@triton.jit(do_not_specialize=["boundary"])
def _spread_kernel(
    src,  # [T, words]
    slots,  # [T, K] int32
    far,  # [F, words]
    near,  # [N, words]
    boundary,  # F
    src_stride,  # in units
    far_stride,
    near_stride,
    WORDS: tl.constexpr,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    for start in tl.static_range(0, WORDS, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < WORDS
        value = tl.load(src + row * src_stride * UNIT + cols, mask=inside)
        for k in tl.static_range(K):
            slot = tl.load(slots + row * K + k).to(tl.int64)
            is_far = slot < boundary
            tl.store(far + slot * far_stride * UNIT + cols, value, mask=inside & is_far & (slot >= 0))
            tl.store(near + (slot - boundary) * near_stride * UNIT + cols, value, mask=inside & (slot >= boundary))


@triton.jit(do_not_specialize=["num_rows", "boundary"])
def _sum_kernel(
    slots,  # [T, K] int32
    far,  # [F, H]
    near,  # [N, H]
    out,  # [T, H]
    num_rows,  # T
    boundary,  # F
    far_stride,  # in units
    near_stride,
    out_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NEAR: tl.constexpr,
    ACC: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    for start in tl.static_range(0, H, BLOCK):
        cols = (start + tl.arange(0, BLOCK))[None, :]
        inside = (rows < num_rows)[:, None] & (cols < H)
        total = tl.zeros((ROWS, BLOCK), dtype=ACC)
        for k in tl.static_range(K):
            slot = tl.load(slots + rows * K + k, mask=rows < num_rows, other=-1).to(tl.int64)[:, None]
            is_far = (slot >= 0) & (slot < boundary)
            part = tl.load(far + slot * far_stride * UNIT + cols, mask=inside & is_far, other=0.0)
            if HAS_NEAR:
                # One of the two masks is empty: one row is read, and a missing one adds an exact zero.
                own = tl.load(
                    near + (slot - boundary) * near_stride * UNIT + cols, mask=inside & (slot >= boundary), other=0.0
                )
                part = tl.where(is_far, part, own)
            total += part.to(ACC)
        tl.store(out + rows[:, None] * out_stride * UNIT + cols, total.to(out.dtype.element_ty), mask=inside)


def spread_rows(src: Tensor, slots: Tensor, far: Tensor, near: Tensor | None, tile: Tile = SPREAD_TILE) -> None:
    """See `rows.spread_rows`."""
    near_rows = far if near is None else near
    boundary = torch.iinfo(torch.int32).max if near is None else len(far)
    item = src.element_size()
    step = math.gcd(16, src.shape[1] * item, *(_alignment(t) for t in (src, far, near_rows)))
    word = min(step, 8)
    views = [_as_words(t, word) for t in (src, far, near_rows)]
    unit = 16 // word if all(_alignment(t) % 16 == 0 for t in views) else 1
    _spread_kernel[(src.shape[0],)](
        views[0],
        slots,
        views[1],
        views[2],
        boundary,
        *(view.stride(0) // unit for view in views),
        WORDS=src.shape[1] * item // word,
        K=slots.shape[1],
        UNIT=unit,
        BLOCK=_block(src.shape[1] * item, tile) // word,
        num_warps=tile.num_warps,
    )


def sum_rows(slots: Tensor, far: Tensor, near: Tensor | None, out: Tensor, tile: Tile = SUM_TILE) -> None:
    """See `rows.sum_rows`."""
    near_rows = far if near is None else near
    boundary = torch.iinfo(torch.int32).max if near is None else len(far)
    tensors = (far, near_rows, out)
    item = out.element_size()
    unit = 16 // item if all(_alignment(t) % 16 == 0 for t in tensors) else 1
    columns = slots.shape[1]
    rows = max(1, tile.copies // power_of_two(columns))
    _sum_kernel[(programs(out.shape[0], rows),)](
        slots,
        far,
        near_rows,
        out,
        out.shape[0],
        boundary,
        *(t.stride(0) // unit for t in tensors),
        H=out.shape[1],
        K=columns,
        UNIT=unit,
        ROWS=rows,
        BLOCK=_block(out.shape[1] * item, tile) // item,
        HAS_NEAR=near is not None,
        ACC=tl.float64 if out.dtype == torch.float64 else tl.float32,
        num_warps=tile.num_warps,
    )


def _alignment(rows: Tensor) -> int:
    """Largest power of two, at most 16, that divides the address of every row."""
    return math.gcd(16, rows.data_ptr(), rows.stride(0) * rows.element_size())


def _as_words(rows: Tensor, word: int) -> Tensor:
    return rows.view(_WORDS[word]) if word != rows.element_size() or not rows.is_floating_point() else rows


def _block(row_bytes: int, tile: Tile) -> int:
    return max(16, min(tile.block_bytes, power_of_two(row_bytes)))
