# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels for `routing.py`: the slot tables in three launches (mark, running sum, look up) and the counts in
one.

Each works on tiles of rows by choices. The torch path needs a dozen small launches for the same, which a layer of a
small model feels. Counts use integer atomics, whose result does not depend on their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.routing import Destinations

_ROWS = 128  # rows of a tile


@triton.jit
def _destination(ids, present, first, count, size):
    """Destination of each choice, -1 for none."""
    offset = ids - first
    served = present & (offset >= 0) & (offset < count)
    return tl.where(served, offset // size, -1)


@triton.jit
def _places(ids_pointer, tokens, first, count, size, last, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr):
    """Row, choice and (own last) destination of a tile; -1 where the choice before goes to the same destination."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    choice = tl.arange(0, KP)[None, :]
    present = (row < tokens) & (choice < K)
    at = ids_pointer + row * K + choice
    dest = _destination(tl.load(at, mask=present, other=-1), present, first, count, size)
    earlier = present & (choice > 0)
    before = _destination(tl.load(at - 1, mask=earlier, other=-1), earlier, first, count, size)
    dest = tl.where((dest == before) & (choice > 0), -1, dest)
    number = count // size
    moved = tl.where(dest == last, number - 1, dest - (dest > last).to(tl.int64))
    return row, choice, present, tl.where((last >= 0) & (dest >= 0), moved, dest)


@triton.jit
def _mark_kernel(ids, marks, tokens, first, count, size, last, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr):
    row, _choice, present, place = _places(ids, tokens, first, count, size, last, K, KP, ROWS)
    tl.store(marks + place * tokens + row, 1, mask=present & (place >= 0))


@triton.jit
def _look_up_kernel(
    ids, running, slots, tokens, first, count, size, last, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr
):
    row, choice, present, place = _places(ids, tokens, first, count, size, last, K, KP, ROWS)
    found = tl.load(running + place * tokens + row, mask=present & (place >= 0), other=0)
    tl.store(slots + row * K + choice, found - 1, mask=present)


@triton.jit
def _count_kernel(
    ids, counted, tokens, start, first, count, size, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr
):
    _row, _choice, present, place = _places(ids, tokens, first, count, size, -1, K, KP, ROWS)
    tl.atomic_add(counted + start + place, 1, mask=present & (place >= 0))


def mark(ids: Tensor, to: Destinations, marks: Tensor) -> None:
    """Write 1 at destination * T + row of every copy."""
    _mark_kernel[_grid(ids)](ids, marks, *_numbers(ids, to), **_tile(ids))


def look_up(ids: Tensor, to: Destinations, running: Tensor) -> Tensor:
    """Read each copy's number off the running sum: the slot table [T, K] int32."""
    slots = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    _look_up_kernel[_grid(ids)](ids, running, slots, *_numbers(ids, to), **_tile(ids))
    return slots


def count(ids: Tensor, layout: Layout, counted: Tensor) -> None:
    """Fill the counts of ranks, nodes and experts of a zeroed count vector."""
    if not len(ids):
        return
    start = 1
    for size in (layout.num_local_experts, layout.num_local_experts * layout.ranks_per_node, 1):
        _count_kernel[_grid(ids)](ids, counted, len(ids), start, 0, layout.num_experts, size, **_tile(ids))
        start += layout.num_experts // size


def _grid(ids: Tensor) -> tuple[int]:
    return (triton.cdiv(len(ids), _ROWS),)


def _numbers(ids: Tensor, to: Destinations) -> tuple[int, int, int, int, int]:
    return len(ids), to.first, to.count, to.size, -1 if to.last is None else to.last


def _tile(ids: Tensor) -> dict[str, int]:
    return {"K": ids.shape[1], "KP": int(triton.next_power_of_2(ids.shape[1])), "ROWS": _ROWS}
