"""Where tables go: as wide as the terminal is, and wide enough for every column in a log or a pipe."""

from __future__ import annotations

import os

from rich.console import Console

WIDE = 120


def console(*, soft_wrap: bool = False, highlight: bool = True) -> Console:
    """Return the console of standard output; rich takes a pipe for 80 columns and would cut heads to "exper…"."""
    found = Console(soft_wrap=soft_wrap, highlight=highlight)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = WIDE
    return found
