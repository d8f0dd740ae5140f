# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels for `swiglu.py`. Both read and write each value once: the goal is the speed of a copy.

    forward    y [R, 2F], weights [R]          ->  out [R, F]                     3 values moved a column
    backward   grad [R, F], y, weights         ->  grad_y [R, 2F], grad_weights   5 values moved a column

A program takes a few rows. The backward of a weight is a sum over its row, so there one program takes the whole row
and the sum stays in its registers, in a fixed order; in all other cases the columns are split over programs.
`benchmarks/fused_swiglu.py` measures the kernels against a copy and against upstream's compiled function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """How the rows are cut.

    Args:
        block_bytes: Bytes of a half row (gate or up) that a program covers in one pass.
        rows: Rows of a program, a power of two.
        num_warps: Warps of a program.
    """

    block_bytes: int
    rows: int
    num_warps: int


# 16 bytes a thread and operand for a row of 1,024 bf16 values: benchmarks/fused_swiglu.py --tune tries others.
FORWARD_TILE = Tile(block_bytes=2048, rows=1, num_warps=4)
BACKWARD_TILE = Tile(block_bytes=2048, rows=1, num_warps=4)


# The number of rows changes with the routing: it must not compile the kernel anew.
@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(
    y,  # [R, 2F]
    weights,  # [R]
    out,  # [R, F]
    num_rows,  # R
    y_stride,
    weight_stride,
    F: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, present = rows[:, None], (rows < num_rows)[:, None]
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = present & (col < F)
    gate = tl.load(y + row * y_stride + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y + row * y_stride + F + col, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        value *= tl.load(weights + rows * weight_stride, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]
    tl.store(out + row * F + col, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _backward_kernel(
    grad,  # [R, F]
    y,  # [R, 2F]
    weights,  # [R]
    grad_y,  # [R, 2F]
    grad_weights,  # [R]
    num_rows,  # R
    grad_stride,
    y_stride,
    weight_stride,
    F: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,  # columns of a program, a multiple of BLOCK
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, present = rows[:, None], (rows < num_rows)[:, None]
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + rows * weight_stride, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, SPAN, BLOCK):
        col = tl.program_id(1) * SPAN + start + tl.arange(0, BLOCK)[None, :]
        inside = present & (col < F)
        gate = tl.load(y + row * y_stride + col, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(y + row * y_stride + F + col, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(grad + row * grad_stride + col, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if WEIGHTED:
            total += silu * up * given
        given *= weight
        # d silu / d gate = sigmoid * (1 + gate * (1 - sigmoid))
        grad_gate = given * sigmoid * (1 + gate * (1 - sigmoid)) * up
        tl.store(grad_y + row * (2 * F) + col, grad_gate.to(grad_y.dtype.element_ty), mask=inside)
        tl.store(grad_y + row * (2 * F) + F + col, (given * silu).to(grad_y.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights + rows, tl.sum(total, axis=1).to(grad_weights.dtype.element_ty), mask=rows < num_rows)


def forward(y: Tensor, weights: Tensor | None, tile: Tile = FORWARD_TILE) -> Tensor:
    """See `swiglu.swiglu`: [R, F] in the dtype of y."""
    rows, columns = y.shape[0], y.shape[1] // 2
    out = torch.empty((rows, columns), dtype=y.dtype, device=y.device)
    if out.numel() == 0:
        return out
    y = _rows_contiguous(y)
    block = _block(columns, y, tile)
    _forward_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(columns, block))](
        y,
        y if weights is None else weights,
        out,
        rows,
        y.stride(0),
        0 if weights is None else weights.stride(0),
        F=columns,
        WEIGHTED=weights is not None,
        ROWS=tile.rows,
        BLOCK=block,
        num_warps=tile.num_warps,
    )
    return out


def backward(
    grad: Tensor, y: Tensor, weights: Tensor | None, tile: Tile = BACKWARD_TILE
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `forward` for y, [R, 2F], and for the weights, [R, 1], each in its input's dtype.

    Args:
        grad: [R, F], of the output.
        y: As in `forward`.
        weights: As in `forward`.
        tile: How the rows are cut.
    """
    rows, columns = y.shape[0], y.shape[1] // 2
    if rows * columns == 0:
        return torch.zeros_like(y), None if weights is None else torch.zeros_like(weights)
    grad_y = torch.empty((rows, 2 * columns), dtype=y.dtype, device=y.device)
    grad_weights = None if weights is None else torch.empty((rows, 1), dtype=weights.dtype, device=y.device)
    y, grad = _rows_contiguous(y), _rows_contiguous(grad)
    block = _block(columns, y, tile)
    span = block if weights is None else triton.cdiv(columns, block) * block
    _backward_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(columns, span))](
        grad,
        y,
        y if weights is None else weights,
        grad_y,
        grad_y if grad_weights is None else grad_weights,
        rows,
        grad.stride(0),
        y.stride(0),
        0 if weights is None else weights.stride(0),
        F=columns,
        WEIGHTED=weights is not None,
        ROWS=tile.rows,
        BLOCK=block,
        SPAN=span,
        num_warps=tile.num_warps,
    )
    return grad_y, grad_weights


def _rows_contiguous(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _block(columns: int, y: Tensor, tile: Tile) -> int:
    return max(16, min(tile.block_bytes // y.element_size(), int(triton.next_power_of_2(columns))))
