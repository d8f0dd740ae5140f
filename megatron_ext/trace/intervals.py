"""Sums over intervals of time that may overlap: unions, what they cover, and what lies between them.

All times are integer nanoseconds, so that sums are exact. An interval is `[start, end)`; a union is two int64 arrays of
equal length, sorted, whose intervals neither overlap nor touch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
Union = tuple[Times, Times]

NOTHING: Union = (np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: Times, end: Times) -> Union:
    """Return the union of intervals in any order; empty ones count nothing."""
    filled = end > start
    order = np.argsort(start[filled], kind="stable")
    begin, reach = start[filled][order], np.maximum.accumulate(end[filled][order])
    if not len(begin):
        return NOTHING
    apart = begin[1:] > reach[:-1]
    return begin[np.concatenate(([True], apart))], reach[np.concatenate((apart, [True]))]


def together(unions: Iterable[Union]) -> Union:
    """Return the union of several."""
    parts = list(unions)
    if not parts:
        return NOTHING
    return union(np.concatenate([start for start, _ in parts]), np.concatenate([end for _, end in parts]))


def measure(covered: Union) -> int:
    """Return the nanoseconds that a union covers."""
    return int((covered[1] - covered[0]).sum())


def clip(covered: Union, begin: int, end: int) -> Union:
    """Return the part of a union that lies in a window."""
    start, stop = np.maximum(covered[0], begin), np.minimum(covered[1], end)
    inside = stop > start
    return start[inside], stop[inside]


def between(covered: Union, begin: int, end: int) -> Union:
    """Return what a union leaves free of a window: its gaps."""
    start, stop = clip(covered, begin, end)
    left = np.concatenate((np.array([begin], np.int64), stop))
    right = np.concatenate((start, np.array([end], np.int64)))
    free = right > left
    return left[free], right[free]


def without(covered: Union, taken: Union) -> Union:
    """Return the part of a union that another one leaves free."""
    if not len(covered[0]):
        return NOTHING
    begin, end = int(covered[0][0]), int(covered[1][-1])
    free = between(taken, begin, end)
    # A time is in both exactly where it is in neither complement.
    outside = together((between(covered, begin, end), between(free, begin, end)))
    return between(outside, begin, end)
