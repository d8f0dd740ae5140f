"""Arithmetic of launches. Triton's own functions for it take a microsecond a call, several times a launch."""

from __future__ import annotations


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, 1 for less than one.

    Examples:
        >>> [power_of_two(n) for n in (0, 1, 2, 3, 64, 65)]
        [1, 1, 2, 4, 64, 128]
    """
    return 1 << max(number - 1, 0).bit_length()


def programs(number: int, tile: int) -> int:
    """How many tiles cover `number`.

    Examples:
        >>> programs(0, 128), programs(128, 128), programs(129, 128)
        (0, 1, 2)
    """
    return -(-number // tile)
