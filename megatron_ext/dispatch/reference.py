"""Plain references: a mixture of experts without dispatch, and dispatch and combine as loops over ranks in
one process.

They share no code with the dispatchers, and are what tests and benchmarks compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ExpertFn = Callable[[int, Tensor], Tensor]


def dense_moe(x: Tensor, ids: Tensor, weights: Tensor, expert: ExpertFn, num_experts: int) -> Tensor:
    """Run every expert over the tokens that chose it and add up, weight times output.

    Args:
        x: [T, H].
        ids: [T, K], -1 for an empty choice; an expert at most once a token.
        weights: [T, K].
        expert: Expert number and its tokens [n, H] to [n, H].
        num_experts: E.
    """
    out = torch.zeros_like(x)
    for number in range(num_experts):
        tokens, choice = torch.nonzero(ids == number, as_tuple=True)
        if len(tokens):
            out = out.index_add(
                0, tokens, expert(number, x[tokens]) * weights[tokens, choice].unsqueeze(1).to(x.dtype)
            )
    return out


def dispatch_rows(ids: Sequence[Tensor], num_local_experts: int) -> list[list[tuple[int, int]]]:
    """Say which (rank, token) rows each rank must receive, once each, as sorted lists.

    Args:
        ids: One [T, K] a rank, T may differ.
        num_local_experts: L.
    """
    wanted: list[set[tuple[int, int]]] = [set() for _ in ids]
    for source, choices in enumerate(ids):
        for token, row in enumerate(choices.tolist()):
            for expert in row:
                if expert >= 0:
                    wanted[expert // num_local_experts].add((source, token))
    return [sorted(rows) for rows in wanted]


def rows_off_set(ids: Tensor, rank: int, *, num_local_experts: int, set_size: int, per: str) -> int:
    """Count rows of one rank that leave its set of `set_size` ranks.

    Args:
        ids: [T, K] of the rank.
        rank: Its number.
        num_local_experts: L.
        set_size: Ranks in a set (1: rank by rank; R: node by node).
        per: One row per "choice", "rank" or "set" reached.
    """
    own, total = rank // set_size, 0
    for row in ids.tolist():
        ranks = [e // num_local_experts for e in row if e >= 0]
        away = [r for r in ranks if r // set_size != own]
        total += {"choice": len(away), "rank": len(set(away)), "set": len({r // set_size for r in away})}[per]
    return total
