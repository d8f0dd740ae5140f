"""How many copies of a token travel. Pure arithmetic, exact for a uniform choice of k different experts.

With S sets (ranks or nodes) of m experts each, E = S * m, a token reaches S * (1 - C(E - m, k) / C(E, k))
sets on
average: the chance to miss one set is that all k lie outside it. Of these, (S - 1) / S lie outside its own
set.
"""

from __future__ import annotations

from math import comb

STATIC_LIMIT = 1.05
"""Static sizes are chosen while they cost at most this much more than the routed copies: free at two nodes
(1.000 against 0.998 at top-8 of 64), 11 % at four, 51 % at eight (top-8 of 256)."""


def sets_hit(num_experts: int, top_k: int, sets: int) -> float:
    """Mean number of sets that a token reaches, its own included.

    Args:
        num_experts: E.
        top_k: k, at most E.
        sets: S, must divide E.

    Examples:
        >>> round(sets_hit(64, 8, 2), 3)
        1.997
    """
    size = num_experts // sets
    return sets * (1 - comb(num_experts - size, top_k) / comb(num_experts, top_k))


def copies_off_set(num_experts: int, top_k: int, sets: int) -> float:
    """Mean number of copies that leave the token's own set, one a set.

    Examples:
        >>> [round(copies_off_set(*case), 3) for case in ((64, 8, 2), (64, 8, 8), (256, 8, 4))]
        [0.998, 4.753, 2.711]
    """
    return sets_hit(num_experts, top_k, sets) * (sets - 1) / sets


def copies_per_expert(top_k: int, sets: int) -> float:
    """Mean number of copies that leave the own set when every choice travels, as `alltoall` does.

    Examples:
        >>> copies_per_expert(8, 2)
        4.0
    """
    return top_k * (sets - 1) / sets


def copies_rank_to_other_node(num_experts: int, top_k: int, ranks: int, nodes: int) -> float:
    """Mean number of copies that leave the own node when each rank gets one.

    Examples:
        >>> round(copies_rank_to_other_node(64, 8, 16, 2), 3)
        3.375
    """
    return sets_hit(num_experts, top_k, ranks) * (nodes - 1) / nodes


def use_static(num_experts: int, top_k: int, sets: int) -> bool:
    """Whether sending every token to every set is about as cheap as sending it where it is needed.

    Examples:
        >>> use_static(64, 8, 2), use_static(256, 8, 4), use_static(8, 2, 8), use_static(64, 8, 1)
        (True, False, False, False)
    """
    if sets == 1 or num_experts % sets:
        return False
    needed = copies_off_set(num_experts, min(top_k, num_experts), sets)
    return sets - 1 <= STATIC_LIMIT * needed
