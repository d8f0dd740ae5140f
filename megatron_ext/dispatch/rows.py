"""Moving rows: write each row to its slots, sum each row's copies back. The two are each other's adjoints.

On a GPU both are one Triton kernel (`kernels.py`); elsewhere plain torch, with the same answer bit for
bit: the sum runs over the columns of the slot table in order, in fp32 (fp64 for fp64 rows), and is rounded
once.

Rows live in two buffers: slots below `len(far)` are rows of `far` (to or from other ranks), the rest are
rows of `near` (this rank's own, which never travel).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.dispatch.switch import use_kernels


def spread_rows(src: Tensor, slots: Tensor, far: Tensor, near: Tensor | None = None) -> None:
    """Write row t of `src` to every slot of row t.

    Args:
        src: [T, C], any dtype, the last dimension contiguous.
        slots: [T, K] int32, -1 for none; every slot at most once in the table.
        far: [F, C], same dtype, written in place.
        near: [N, C], the slots from F on.
    """
    if src.shape[0] == 0 or src.shape[1] == 0:
        return
    if use_kernels(src):
        from megatron_ext.dispatch import kernels

        kernels.spread_rows(src, slots, far, near)
        return
    for column in slots.unbind(1):
        _put(far, src, column, 0)
        if near is not None:
            _put(near, src, column, len(far))


def sum_rows(slots: Tensor, far: Tensor, near: Tensor | None, out: Tensor) -> None:
    """Write to row t of `out` the sum of the rows at its slots: zero where it has none.

    Args:
        slots: [T, K] int32, -1 for none.
        far: [F, H] floating, the last dimension contiguous.
        near: [N, H], the slots from F on.
        out: [T, H], same dtype, written in place.
    """
    if out.shape[0] == 0 or out.shape[1] == 0:
        return
    if use_kernels(out):
        from megatron_ext.dispatch import kernels

        kernels.sum_rows(slots, far, near, out)
        return
    total = torch.zeros(out.shape, dtype=accumulator(out.dtype), device=out.device)
    for column in slots.unbind(1):
        _add(total, far, column, 0)
        if near is not None:
            _add(total, near, column, len(far))
    out.copy_(total)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of `dtype` rows run."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _put(dst: Tensor, src: Tensor, column: Tensor, start: int) -> None:
    kept = (column >= start) & (column < start + len(dst))
    dst[(column[kept] - start).long()] = src[kept]


def _add(total: Tensor, rows: Tensor, column: Tensor, start: int) -> None:
    kept = (column >= start) & (column < start + len(rows))
    total[kept] += rows[(column[kept] - start).long()].to(total.dtype)
