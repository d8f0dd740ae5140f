# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels for `routing.py`: the slot tables in three launches (mark, running sum, look up) or, with fixed sizes,
in one, and all counts in one.

The slot kernels work on tiles of rows by choices. The torch path needs a dozen small launches for the same, which a
layer of a small model feels. A program of the counts compares its choices with every bin and adds each bin once: many
programs that all add to a few bins choice by choice wait for each other. Integer atomics do not depend on their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.routing import Destinations
from megatron_ext.dispatch.tiles import power_of_two, programs

_ROWS = 128  # rows of a tile
_CHOICES = 64  # choices that a program of the counts compares at a time
_STEPS = 8  # how often
_BINS = 64  # most bins that it compares them with at a time
# Not specialized on: that one of these is 1 or a multiple of 16 is worth no kernel of its own.
_NUMBERS = ["tokens", "first", "count", "last"]


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


@triton.jit(do_not_specialize=_NUMBERS)
def _mark_kernel(ids, marks, tokens, first, count, size, last, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr):
    row, _choice, present, place = _places(ids, tokens, first, count, size, last, K, KP, ROWS)
    tl.store(marks + place * tokens + row, 1, mask=present & (place >= 0))


@triton.jit(do_not_specialize=[*_NUMBERS, "D"])
def _look_up_kernel(
    ids,
    running,
    slots,
    counts,  # [D] int64
    tokens,
    first,
    count,
    size,
    last,
    D,
    DP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, choice, present, place = _places(ids, tokens, first, count, size, last, K, KP, ROWS)
    found = tl.load(running + place * tokens + row, mask=present & (place >= 0), other=0)
    tl.store(slots + row * K + choice, found - 1, mask=present)
    # The first program reads off how many each destination has: the differences of the sums at their ends.
    dest = tl.arange(0, DP).to(tl.int64)
    mine = (dest < D) & (tl.program_id(0) == 0)
    end = tl.load(running + (dest + 1) * tokens - 1, mask=mine, other=0)
    start = tl.load(running + dest * tokens - 1, mask=mine & (dest > 0), other=0)
    tl.store(counts + dest, (end - start).to(tl.int64), mask=mine)


@triton.jit(do_not_specialize=[*_NUMBERS, "capacity"])
def _fixed_slots_kernel(
    ids, slots, capacity, tokens, first, count, size, last, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr
):
    row, choice, present, place = _places(ids, tokens, first, count, size, last, K, KP, ROWS)
    slot = tl.where(place >= 0, place * capacity + row, -1)
    tl.store(slots + row * K + choice, slot.to(tl.int32), mask=present)


@triton.jit
def _tally(
    ids, counted, choices, E, SIZE: tl.constexpr, NUMBER: tl.constexpr, K: tl.constexpr, BINS: tl.constexpr,
    STEP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Add this program's choices to NUMBER destinations of SIZE experts each; return how many they are."""
    total = 0
    for start in range(0, NUMBER, BINS):
        seen = tl.zeros((STEP, BINS), dtype=tl.int32)
        bins = start + tl.arange(0, BINS)
        for step in range(STEPS):
            at = (tl.program_id(0).to(tl.int64) * STEPS + step) * STEP + tl.arange(0, STEP)[:, None]
            present = at < choices
            earlier = present & (at % K > 0)
            dest = _destination(tl.load(ids + at, mask=present, other=-1), present, 0, E, SIZE)
            before = _destination(tl.load(ids + at - 1, mask=earlier, other=-1), earlier, 0, E, SIZE)
            dest = tl.where((dest == before) & earlier, -1, dest)
            seen += (dest == bins[None, :]).to(tl.int32)
        found = tl.sum(seen, axis=0)
        tl.atomic_add(counted + bins, found, mask=(bins < NUMBER) & (found > 0), sem="relaxed")
        total += tl.sum(tl.where(bins < NUMBER, found, 0), axis=0)
    return total


@triton.jit(do_not_specialize=["tokens"])
def _count_kernel(
    ids,
    counted,  # [1 + W + N + E + 1] int32, zeros
    tokens,
    choices,  # tokens * K
    W: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BINS_W: tl.constexpr,
    BINS_N: tl.constexpr,
    BINS_E: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
):
    total = _tally(ids, counted + 1, choices, E, E // W, W, K, BINS_W, STEP, STEPS)
    total += _tally(ids, counted + 1 + W, choices, E, E // N, N, K, BINS_N, STEP, STEPS)
    total += _tally(ids, counted + 1 + W + N, choices, E, 1, E, K, BINS_E, STEP, STEPS)
    # The first program adds the tokens, every one its share of the check sum.
    here = tl.where(tl.program_id(0) == 0, tokens, 0)
    tl.atomic_add(counted, here, mask=here > 0, sem="relaxed")
    tl.atomic_add(counted + 1 + W + N + E, total + here, sem="relaxed")


def mark(ids: Tensor, to: Destinations, marks: Tensor) -> None:
    """Write 1 at destination * T + row of every copy."""
    _mark_kernel[_grid(ids)](ids, marks, *_numbers(ids, to), **_tile(ids))


def look_up(ids: Tensor, to: Destinations, running: Tensor) -> tuple[Tensor, Tensor]:
    """Read each copy's number off the running sum: slots [T, K] int32, and the rows of each destination [D] int64."""
    slots = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    counts = torch.empty(to.number, dtype=torch.int64, device=ids.device)
    width = {"D": to.number, "DP": power_of_two(to.number)}
    _look_up_kernel[_grid(ids)](ids, running, slots, counts, *_numbers(ids, to), **width, **_tile(ids))
    return slots, counts


def fixed_slots(ids: Tensor, to: Destinations, capacity: int) -> Tensor:
    """See `routing.fixed_slots`."""
    slots = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    if ids.numel():
        _fixed_slots_kernel[_grid(ids)](ids, slots, capacity, *_numbers(ids, to), **_tile(ids))
    return slots


def count(ids: Tensor, layout: Layout, counted: Tensor) -> None:
    """Fill a zeroed count vector."""
    world, nodes, num_experts = layout.world, layout.num_nodes, layout.num_experts
    grid = max(1, programs(ids.numel(), _CHOICES * _STEPS))  # without choices there still are tokens to count
    _count_kernel[(grid,)](
        ids,
        counted,
        len(ids),
        ids.numel(),
        W=world,
        N=nodes,
        E=num_experts,
        K=ids.shape[1],
        BINS_W=_bins(world),
        BINS_N=_bins(nodes),
        BINS_E=_bins(num_experts),
        STEP=_CHOICES,
        STEPS=_STEPS,
    )


def _bins(number: int) -> int:
    return min(power_of_two(number), _BINS)


def _grid(ids: Tensor) -> tuple[int]:
    return (programs(len(ids), _ROWS),)


def _numbers(ids: Tensor, to: Destinations) -> tuple[int, int, int, int, int]:
    return len(ids), to.first, to.count, to.size, -1 if to.last is None else to.last


def _tile(ids: Tensor) -> dict[str, int]:
    return {"K": ids.shape[1], "KP": power_of_two(ids.shape[1]), "ROWS": _ROWS}
