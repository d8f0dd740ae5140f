"""Fewer points without hiding anything: what is kept, and the sentence that says so."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# Twice the pixels of a wide chart would add nothing visible.
MAX_POINTS = 600


@dataclass(frozen=True)
class Thinned:
    """Indices kept, and a note for the reader (empty when all were)."""

    keep: np.ndarray
    note: str = ""


def thin(values: np.ndarray, limit: int = MAX_POINTS) -> Thinned:
    """Choose points of a curve for drawing: of each interval its lowest and its highest, so that no spike is lost.

    Args:
        values: float64 [N], finite.
        limit: Most points to keep.
    """
    number = len(values)
    if number <= limit:
        return Thinned(np.arange(number))
    edges = np.linspace(0, number, limit // 2 + 1).astype(int)
    keep = {0, number - 1}
    for low, high in pairwise(edges):
        if high > low:
            keep |= {low + int(values[low:high].argmin()), low + int(values[low:high].argmax())}
    note = f"{number:,} steps are drawn as {limit // 2} intervals, each with its lowest and highest value."
    return Thinned(np.array(sorted(keep)), note)


def thin_frames(number: int, limit: int) -> Thinned:
    """Choose frames evenly, the first and the last among them."""
    if number <= limit:
        return Thinned(np.arange(number))
    keep = np.unique(np.linspace(0, number - 1, limit).round().astype(int))
    return Thinned(keep, f"{number:,} sampled steps; the slider has {len(keep)} of them, evenly spaced.")


@dataclass(frozen=True)
class Columns:
    """Experts put together into fewer columns: counts [.., C], the experts of each column, and a note."""

    busiest: np.ndarray
    quietest: np.ndarray
    width: int
    note: str = ""


def thin_experts(ratio: np.ndarray, limit: int) -> Columns:
    """Put neighbouring experts into one column where there are more than `limit`.

    Args:
        ratio: float64 [..., E], load of each expert over an even load.
        limit: Most columns.

    Returns:
        Busiest and quietest expert of each column, [..., C].
    """
    experts = ratio.shape[-1]
    width = -(-experts // limit)
    if width == 1:
        return Columns(ratio, ratio, 1)
    fill = -experts % width
    low = np.concatenate([ratio, np.full((*ratio.shape[:-1], fill), np.inf)], axis=-1)
    high = np.concatenate([ratio, np.full((*ratio.shape[:-1], fill), -np.inf)], axis=-1)
    shape = (*ratio.shape[:-1], (experts + fill) // width, width)
    note = (
        f"Each column stands for {width} neighbouring experts and shows the one furthest from an even share, so "
        "an idle or an overloaded expert stays visible."
    )
    return Columns(high.reshape(shape).max(axis=-1), low.reshape(shape).min(axis=-1), width, note)
