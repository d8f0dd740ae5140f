# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels for `tally.py`: each reads its inputs once, where the torch path makes a dozen passes over [T, E].

Everything after the load is fp64, in the order: columns of a row, rows of a program, programs. A program leaves its
sums in a row of its own and torch adds the rows, so nothing is added by atomics: the same input gives the same bits.
The number of dispatched rows is never specialized on: with expert parallel it changes every micro-batch.
`benchmarks/observe_pieces.py` times them beside the torch path.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs of a kernel over tokens: a few for each multiprocessor, and few rows to add up afterwards.
_PROGRAMS = 512
# Entries of [T, E] that a program works on at a time.
_TILE = 1024
# Warps of the kernels that keep several fp64 tiles: with four, values spill out of the registers.
_FLOAT_WARPS = 8
# Entries of [R, H] that a program has in flight, and of them in one row.
_ROWS_TILE = 8192
_ROWS_BLOCK = 1024
# Rows of an expert that its program adds at a time.
_SEGMENT_BLOCK = 1024


@triton.jit
def _mask(tile, valid, tokens, ROWS: tl.constexpr, HAS_VALID: tl.constexpr):
    """Row numbers of a tile, and which of them are tokens that count."""
    rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    counts = rows < tokens
    if HAS_VALID:
        counts = counts & (tl.load(valid + rows, mask=counts, other=0) != 0)
    return rows, counts


@triton.jit
def _logit_kernel(
    logits,  # [T, E]
    valid,  # uint8 [T]
    out,  # fp64 [programs, 3]
    tokens,  # T
    stride,
    E: tl.constexpr,
    EP: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    HAS_VALID: tl.constexpr,
):
    cols = tl.arange(0, EP)[None, :]
    seen = tl.zeros((ROWS,), tl.float64)
    squares = tl.zeros((ROWS,), tl.float64)
    entropies = tl.zeros((ROWS,), tl.float64)
    # One expert: the entropy is 0, whatever it is divided by.
    scale = tl.log(tl.full((ROWS,), E if E > 1 else 2, tl.float64))
    for tile in range(TILES):
        rows, counts = _mask(tl.program_id(0) * TILES + tile, valid, tokens, ROWS, HAS_VALID)
        inside = (rows < tokens)[:, None] & (cols < E)
        z = tl.load(logits + rows[:, None] * stride + cols, mask=inside, other=0.0).to(tl.float32).to(tl.float64)
        z = tl.where(cols < E, z, float("-inf"))
        top = tl.max(z, 1)
        weight = tl.exp(z - top[:, None])
        total = tl.sum(weight, 1)
        lse = top + tl.log(total)
        share = weight / total[:, None]
        entropy = -tl.sum(tl.where(share > 0, share * (tl.where(share > 0, z, 0.0) - lse[:, None]), 0.0), 1) / scale
        seen += tl.where(counts, 1.0, 0.0)
        squares += tl.where(counts, lse * lse, 0.0)
        entropies += tl.where(counts, entropy, 0.0)
    at = out + tl.program_id(0) * 3
    tl.store(at, tl.sum(seen, 0))
    tl.store(at + 1, tl.sum(squares, 0))
    tl.store(at + 2, tl.sum(entropies, 0))


@triton.jit
def _weight_kernel(
    probs,  # [T, E], 0 where not chosen
    valid,  # uint8 [T]
    out,  # fp64 [programs, 7]
    tokens,  # T
    stride,
    E: tl.constexpr,
    EP: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    HAS_VALID: tl.constexpr,
):
    cols = tl.arange(0, EP)[None, :]
    seen = tl.zeros((ROWS,), tl.float64)
    entropies = tl.zeros((ROWS,), tl.float64)
    tops = tl.zeros((ROWS,), tl.float64)
    pairs = tl.zeros((ROWS,), tl.float64)
    ratios = tl.zeros((ROWS,), tl.float64)
    sizes = tl.zeros((ROWS,), tl.float64)
    size_squares = tl.zeros((ROWS,), tl.float64)
    scale = tl.log(tl.full((ROWS,), TOPK if TOPK > 1 else 2, tl.float64))
    for tile in range(TILES):
        rows, counts = _mask(tl.program_id(0) * TILES + tile, valid, tokens, ROWS, HAS_VALID)
        inside = (rows < tokens)[:, None] & (cols < E)
        w = tl.load(probs + rows[:, None] * stride + cols, mask=inside, other=0.0).to(tl.float32).to(tl.float64)
        total = tl.sum(w, 1)
        squares = tl.sum(w * w, 1)
        first = tl.max(w, 1)
        is_first = w == first[:, None]
        rest = tl.max(tl.where(is_first, 0.0, w), 1)
        second = tl.where(tl.sum(is_first.to(tl.int32), 1) > 1, first, rest)
        counts = counts & (total > 0)
        share = w / tl.where(total > 0, total, 1.0)[:, None]
        entropy = -tl.sum(tl.where(share > 0, share * tl.log(tl.where(share > 0, share, 1.0)), 0.0), 1) / scale
        pair = counts & (second > 0) & (TOPK > 1)
        seen += tl.where(counts, 1.0, 0.0)
        entropies += tl.where(counts, entropy, 0.0)
        tops += tl.where(counts, first / tl.where(total > 0, total, 1.0), 0.0)
        pairs += tl.where(pair, 1.0, 0.0)
        ratios += tl.where(pair, first / tl.where(pair, second, 1.0), 0.0)
        sizes += tl.where(counts, tl.sqrt(squares), 0.0)
        size_squares += tl.where(counts, squares, 0.0)
    at = out + tl.program_id(0) * 7
    tl.store(at, tl.sum(seen, 0))
    tl.store(at + 1, tl.sum(entropies, 0))
    tl.store(at + 2, tl.sum(tops, 0))
    tl.store(at + 3, tl.sum(pairs, 0))
    tl.store(at + 4, tl.sum(ratios, 0))
    tl.store(at + 5, tl.sum(sizes, 0))
    tl.store(at + 6, tl.sum(size_squares, 0))


@triton.jit
def _differs(a, b, rows, cols, inside, stride):
    """Of each row, whether two uint8 maps differ."""
    left = tl.load(a + rows[:, None] * stride + cols, mask=inside, other=0)
    right = tl.load(b + rows[:, None] * stride + cols, mask=inside, other=0)
    return tl.max((left != right).to(tl.int32), 1)


@triton.jit
def _flip_kernel(
    chosen,  # uint8 [T, E], and so are the next three
    native,
    exact,
    coarse,
    order,  # uint8 [T]
    valid,  # uint8 [T]
    out,  # fp64 [programs, 5]
    tokens,  # T
    E: tl.constexpr,
    EP: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    HAS_COARSE: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_VALID: tl.constexpr,
):
    cols = tl.arange(0, EP)[None, :]
    seen = tl.zeros((ROWS,), tl.float64)
    flips = tl.zeros((ROWS,), tl.float64)
    orders = tl.zeros((ROWS,), tl.float64)
    coarses = tl.zeros((ROWS,), tl.float64)
    unlike = tl.zeros((ROWS,), tl.float64)
    for tile in range(TILES):
        rows, counts = _mask(tl.program_id(0) * TILES + tile, valid, tokens, ROWS, HAS_VALID)
        inside = (rows < tokens)[:, None] & (cols < E)
        flip = _differs(native, exact, rows, cols, inside, E)
        seen += tl.where(counts, 1.0, 0.0)
        flips += tl.where(counts, flip, 0).to(tl.float64)
        unlike += tl.where(counts, _differs(native, chosen, rows, cols, inside, E), 0).to(tl.float64)
        if HAS_ORDER:
            moved = tl.load(order + rows, mask=counts, other=0) != 0
            orders += tl.where(counts & (moved | (flip != 0)), 1.0, 0.0)
        if HAS_COARSE:
            coarses += tl.where(counts, _differs(coarse, exact, rows, cols, inside, E), 0).to(tl.float64)
    at = out + tl.program_id(0) * 5
    tl.store(at, tl.sum(seen, 0))
    tl.store(at + 1, tl.sum(flips, 0))
    tl.store(at + 2, tl.sum(orders, 0))
    tl.store(at + 3, tl.sum(coarses, 0))
    tl.store(at + 4, tl.sum(unlike, 0))


@triton.jit
def _aux_kernel(
    chosen,  # uint8 [T, E]
    aux,  # uint8 [T, E]
    scores,  # [T, E], 0 at padding
    valid,  # uint8 [T]
    out,  # fp64 [programs, 2 + E]
    tokens,  # T
    E: tl.constexpr,
    EP: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    HAS_VALID: tl.constexpr,
):
    cols = tl.arange(0, EP)[None, :]
    given = tl.zeros((ROWS,), tl.float64)
    differs = tl.zeros((ROWS,), tl.float64)
    columns = tl.zeros((ROWS, EP), tl.float64)
    for tile in range(TILES):
        rows, counts = _mask(tl.program_id(0) * TILES + tile, valid, tokens, ROWS, HAS_VALID)
        inside = (rows < tokens)[:, None] & (cols < E)
        at = rows[:, None] * E + cols
        mine = tl.load(chosen + at, mask=inside & counts[:, None], other=0) != 0
        theirs = tl.load(aux + at, mask=inside, other=0) != 0
        given += tl.sum(mine.to(tl.int32), 1).to(tl.float64)
        differs += tl.sum((mine & (theirs == 0)).to(tl.int32), 1).to(tl.float64)
        columns += tl.load(scores + at, mask=inside, other=0.0).to(tl.float64)
    to = out + tl.program_id(0) * (2 + E)
    tl.store(to, tl.sum(given, 0))
    tl.store(to + 1, tl.sum(differs, 0))
    each = tl.arange(0, EP)
    tl.store(to + 2 + each, tl.sum(columns, 0), mask=each < E)


@triton.jit(do_not_specialize=["num_rows"])
def _row_kernel(
    values,  # [R, H]
    weights,  # [R]
    out,  # fp64 [R]
    num_rows,  # R
    stride,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.static_range(0, H, BLOCK):
        inside = (rows < num_rows)[:, None] & (start + cols < H)
        value = tl.load(values + rows[:, None] * stride + start + cols, mask=inside, other=0.0).to(tl.float32)
        total += value * value
    mean = tl.sum(total, 1).to(tl.float64) / H
    if HAS_WEIGHTS:
        weight = tl.load(weights + rows, mask=rows < num_rows, other=0.0).to(tl.float64)
        real = weight != 0
        mean = tl.where(real, mean / tl.where(real, weight * weight, 1.0), 0.0)
    tl.store(out + rows, mean, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _segment_kernel(
    means,  # fp64 [R]
    weights,  # [R]
    counts,  # int [E]
    out,  # fp64 [2, E]
    num_rows,  # R
    E: tl.constexpr,
    EP: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    expert = tl.program_id(0)
    each = tl.arange(0, EP)
    count = tl.load(counts + each, mask=each < E, other=0).to(tl.int64)
    begin = tl.sum(tl.where(each < expert, count, 0), 0).to(tl.int32)
    end = tl.minimum(tl.sum(tl.where(each <= expert, count, 0), 0).to(tl.int32), num_rows)
    total = tl.zeros((BLOCK,), tl.float64)
    seen = tl.zeros((BLOCK,), tl.float64)
    start = begin
    while start < end:
        rows = start + tl.arange(0, BLOCK)
        real = rows < end
        total += tl.load(means + rows, mask=real, other=0.0)
        if HAS_WEIGHTS:
            real = real & (tl.load(weights + rows, mask=real, other=0.0) != 0)
        seen += tl.where(real, 1.0, 0.0)
        start += BLOCK
    tl.store(out + expert, tl.sum(seen, 0))
    tl.store(out + E + expert, tl.sum(total, 0))


def logit_sums(logits: Tensor, valid: Tensor | None) -> Tensor:
    """See `tally.logit_sums`."""
    logits = _rows(logits)
    out, tile = _tiles(logits, 3)
    _logit_kernel[(len(out),)](
        logits,
        _bytes(valid, logits),
        out,
        len(logits),
        logits.stride(0),
        **tile,
        HAS_VALID=valid is not None,
        num_warps=_FLOAT_WARPS,
    )
    return out.sum(0)


def weight_sums(probs: Tensor, topk: int, valid: Tensor | None) -> Tensor:
    """See `tally.weight_sums`; no more than `topk` weights of a row may be above 0."""
    probs = _rows(probs)
    out, tile = _tiles(probs, 7)
    _weight_kernel[(len(out),)](
        probs,
        _bytes(valid, probs),
        out,
        len(probs),
        probs.stride(0),
        **tile,
        TOPK=topk,
        HAS_VALID=valid is not None,
        num_warps=_FLOAT_WARPS,
    )
    return out.sum(0)


def flip_sums(
    chosen: Tensor,
    native: Tensor,
    exact: Tensor,
    coarse: Tensor | None,
    order: Tensor | None,
    valid: Tensor | None,
) -> Tensor:
    """See `tally.flip_sums`."""
    out, tile = _tiles(chosen, 5)
    _flip_kernel[(len(out),)](
        _bytes(chosen, chosen),
        _bytes(native, chosen),
        _bytes(exact, chosen),
        _bytes(coarse, chosen),
        _bytes(order, chosen),
        _bytes(valid, chosen),
        out,
        len(chosen),
        **tile,
        HAS_COARSE=coarse is not None,
        HAS_ORDER=order is not None,
        HAS_VALID=valid is not None,
    )
    return out.sum(0)


def aux_sums(routing_map: Tensor, aux_map: Tensor, scores: Tensor, valid: Tensor | None) -> Tensor:
    """See `tally.aux_sums`."""
    out, tile = _tiles(routing_map, 2 + routing_map.shape[1])
    _aux_kernel[(len(out),)](
        _bytes(routing_map, routing_map),
        _bytes(aux_map, routing_map),
        scores.contiguous(),
        _bytes(valid, routing_map),
        out,
        len(routing_map),
        **tile,
        HAS_VALID=valid is not None,
    )
    return out.sum(0)


def expert_row_sums(output: Tensor, probs: Tensor | None, tokens_per_expert: Tensor) -> Tensor:
    """See `tally.expert_row_sums`; `tokens_per_expert` may still be on the host."""
    output = _rows(output)
    num_rows, hidden = output.shape
    experts = tokens_per_expert.shape[0]
    counts = tokens_per_expert.to(output.device, non_blocking=True)
    means = torch.empty(num_rows, dtype=torch.float64, device=output.device)
    sums = torch.empty(2, experts, dtype=torch.float64, device=output.device)
    weights = means if probs is None else probs.reshape(-1).contiguous()
    block = min(_ROWS_BLOCK, _power(hidden))
    rows = max(1, _ROWS_TILE // block)
    if num_rows:
        _row_kernel[(triton.cdiv(num_rows, rows),)](
            output,
            weights,
            means,
            num_rows,
            output.stride(0),
            H=hidden,
            ROWS=rows,
            BLOCK=block,
            HAS_WEIGHTS=probs is not None,
        )
    _segment_kernel[(experts,)](
        means,
        weights,
        counts,
        sums,
        num_rows,
        E=experts,
        EP=_power(experts),
        BLOCK=_SEGMENT_BLOCK,
        HAS_WEIGHTS=probs is not None,
    )
    return sums


def _tiles(table: Tensor, fields: int) -> tuple[Tensor, dict[str, Any]]:
    """Return the programs' sums for a [T, E] table, not filled, and how a program cuts it."""
    tokens, experts = table.shape
    padded = _power(experts)
    rows = max(1, _TILE // padded)
    # A power of two, so that batches of changing length don't each have a kernel compiled.
    tiles = _power(triton.cdiv(tokens, rows * _PROGRAMS))
    out = torch.empty(triton.cdiv(tokens, rows * tiles), fields, dtype=torch.float64, device=table.device)
    return out, {"E": experts, "EP": padded, "ROWS": rows, "TILES": tiles}


def _rows(table: Tensor) -> Tensor:
    """Return a table whose rows are contiguous: the same one wherever Megatron made it."""
    return table if table.stride(-1) == 1 else table.contiguous()


def _bytes(flags: Tensor | None, stand_in: Tensor) -> Tensor:
    """Return bools as contiguous bytes; for None any tensor, which the kernel doesn't read."""
    return stand_in if flags is None else flags.contiguous().view(torch.uint8)


def _power(number: int) -> int:
    return int(triton.next_power_of_2(number))
