# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Triton kernels for the choices of tokens in `routing.py`: from a routing map to expert numbers and weights in one
launch, the gradient of the probabilities in another.

A chosen expert's place in its row is the number of chosen ones before it, so each writes itself there: no sort, no
top-k, and no two writers of one place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.dispatch.tiles import power_of_two, programs

_TILE = 2048  # elements of a tile, rows times experts
_BLOCK = 256  # most experts of a tile


@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(
    routing_map,  # [T, E] uint8
    probs,  # [T, E]
    ids,  # [T, K] int64
    weights,  # [T, K]
    tokens,  # T
    E: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    before = tl.zeros((ROWS, 1), dtype=tl.int32)
    for start in range(0, E, BLOCK):
        expert = start + tl.arange(0, BLOCK)[None, :]
        at = row * E + expert
        chosen = (tl.load(routing_map + at, mask=(row < tokens) & (expert < E), other=0) != 0).to(tl.int32)
        place = before + tl.cumsum(chosen, axis=1) - 1
        put = (chosen > 0) & (place < K)
        to = row * K + place
        tl.store(ids + to, tl.broadcast_to(expert, (ROWS, BLOCK)).to(tl.int64), mask=put)
        tl.store(weights + to, tl.load(probs + at, mask=put, other=0.0), mask=put)
        before += tl.sum(chosen, axis=1, keep_dims=True)
    choice = tl.arange(0, KP)[None, :]
    empty = (row < tokens) & (choice < K) & (choice >= before)
    to = row * K + choice
    tl.store(ids + to, tl.full((ROWS, KP), -1, tl.int64), mask=empty)
    tl.store(weights + to, tl.zeros((ROWS, KP), weights.dtype.element_ty), mask=empty)


@triton.jit(do_not_specialize=["tokens"])
def _choose_grad_kernel(
    ids,  # [T, K] int64
    grad_weights,  # [T, K]
    grad_probs,  # [T, E]
    tokens,  # T
    E: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = row < tokens
    grad = tl.zeros((ROWS, BLOCK), grad_probs.dtype.element_ty)
    for k in tl.static_range(K):
        chosen = tl.load(ids + row * K + k, mask=there, other=-1)
        grad = tl.where(expert == chosen, tl.load(grad_weights + row * K + k, mask=there, other=0.0), grad)
    tl.store(grad_probs + row * E + expert, grad, mask=there & (expert < E))


def choose(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """See `routing.choose`."""
    tokens, num_experts = routing_map.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=probs.device)
    weights = probs.new_empty(tokens, top_k)
    if ids.numel():
        tile = _tile(num_experts)
        _choose_kernel[(programs(tokens, tile["ROWS"]),)](
            routing_map.bool().contiguous().view(torch.uint8),
            probs.contiguous(),
            ids,
            weights,
            tokens,
            E=num_experts,
            K=top_k,
            KP=power_of_two(top_k),
            **tile,
        )
    return ids, weights


def choose_grad(ids: Tensor, grad_weights: Tensor, num_experts: int) -> Tensor:
    """See `routing.choose_grad`."""
    tokens, top_k = ids.shape
    grad_probs = grad_weights.new_empty(tokens, num_experts)
    if grad_probs.numel():
        tile = _tile(num_experts)
        grid = (programs(tokens, tile["ROWS"]), programs(num_experts, tile["BLOCK"]))
        _choose_grad_kernel[grid](ids, grad_weights.contiguous(), grad_probs, tokens, E=num_experts, K=top_k, **tile)
    return grad_probs


def _tile(num_experts: int) -> dict[str, int]:
    block = min(power_of_two(num_experts), _BLOCK)
    return {"ROWS": _TILE // block, "BLOCK": block}
