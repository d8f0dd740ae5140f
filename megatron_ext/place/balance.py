"""Which expert goes to which rank, from tokens counted: as many experts a rank, loads as even as can be found."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Order = npt.NDArray[np.int64]

FRAMES = 5  # samples that are counted together where nothing else is asked for


def excess(counts: Counts, ranks: int) -> npt.NDArray[np.float64]:
    """Return the fullest rank's tokens over the mean, less 1, were experts laid over ranks by number.

    Args:
        counts: [..., E], tokens of each expert.
        ranks: R, a divisor of E: rank r has experts r * E / R and so on.

    Returns:
        [...], 0 where all ranks get as many (or there are no tokens).
    """
    by_rank = counts.reshape(*counts.shape[:-1], ranks, -1).sum(-1)
    mean = by_rank.mean(-1)
    return np.asarray(np.divide(by_rank.max(-1), mean, out=np.ones_like(mean), where=mean > 0) - 1)


def even_order(counts: Counts, ranks: int) -> Order:
    """Return which expert gets which number: `order[new]` is the expert's number now.

    The experts go from the busiest to the least busy to the rank with the fewest tokens that has room (longest
    processing time first; Graham, Bounds on multiprocessing timing anomalies, 1969). What is evener still on these
    counts was no evener on later ones. Ranks keep the number at which most of their experts are already, and experts
    that stay keep theirs, so little moves.

    Args:
        counts: [E], tokens of each expert.
        ranks: R, a divisor of E.

    Returns:
        [E], a permutation; no more uneven on these counts than the numbers now.
    """
    size = len(counts) // ranks
    places: list[list[int]] = [[] for _ in range(ranks)]
    loads = np.zeros(ranks, dtype=np.int64)
    for expert in np.argsort(-counts, kind="stable"):
        rank = min((r for r in range(ranks) if len(places[r]) < size), key=lambda r: int(loads[r]))
        places[rank].append(int(expert))
        loads[rank] += counts[expert]
    order = _numbered(places, size)
    kept = np.arange(len(counts))
    return order if excess(counts[order], ranks) < excess(counts, ranks) else kept


def _numbered(places: list[list[int]], size: int) -> Order:
    """Give the sets of experts ranks, and the experts numbers, that change little."""
    stay = np.array([[sum(expert // size == rank for expert in members) for rank in range(len(places))]
                     for members in places])
    order = np.full(len(places) * size, -1, dtype=np.int64)
    for _ in places:
        of, rank = divmod(int(stay.argmax()), len(places))
        stay[of, :] = stay[:, rank] = -1
        members = set(places[of])
        block = range(rank * size, (rank + 1) * size)
        moved = sorted(members - set(block))
        for number in block:
            order[number] = number if number in members else moved.pop(0)
    return order
