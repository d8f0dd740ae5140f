"""Moving rows and their weights: write each to its slots, sum a row's copies back. The two are each other's adjoints.

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


def copy_rows(src: Tensor, out: Tensor) -> None:
    """Copy rows to rows that lie apart, in words of 8 bytes where both allow it.

    torch copies such rows element by element, and one of 2 bytes takes it about as long as one of 8.

    Args:
        src: [T, C], any dtype, the last dimension contiguous.
        out: [T, C], same dtype, written in place.
    """
    steps = (step for t in (src, out) for step in (t.shape[1], t.stride(0), t.storage_offset()))
    if all(step * src.element_size() % 8 == 0 for step in steps):
        src, out = src.view(torch.int64), out.view(torch.int64)
    out.copy_(src)


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


def spread_weights(weights: Tensor, slots: Tensor, out: Tensor) -> None:
    """Write each weight to its slot.

    Args:
        weights: [T, K].
        slots: [T, K] int32, -1 for none; every slot at most once.
        out: [R], same dtype, written in place.
    """
    if slots.numel() == 0:
        return
    if use_kernels(weights):
        from megatron_ext.dispatch import weight_kernels

        weight_kernels.spread_weights(weights, slots, out)
        return
    kept = slots >= 0
    out[slots[kept].long()] = weights[kept]


def gather_weights(flat: Tensor, slots: Tensor) -> Tensor:
    """Return what lies at each slot, [T, K] of the same dtype: 0 where there is none. The adjoint of `spread_weights`.

    Args:
        flat: [R].
        slots: [T, K] int32, -1 for none.
    """
    out = flat.new_empty(slots.shape)
    if out.numel() == 0:
        return out
    if use_kernels(flat):
        from megatron_ext.dispatch import weight_kernels

        weight_kernels.gather_weights(flat, slots, out)
        return out
    kept = slots >= 0
    out.zero_()
    out[kept] = flat[slots[kept].long()]
    return out


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of `dtype` rows run."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _put(dst: Tensor, src: Tensor, column: Tensor, start: int) -> None:
    kept = (column >= start) & (column < start + len(dst))
    dst[(column[kept] - start).long()] = src[kept]


def _add(total: Tensor, rows: Tensor, column: Tensor, start: int) -> None:
    kept = (column >= start) & (column < start + len(rows))
    total[kept] += rows[(column[kept] - start).long()].to(total.dtype)
