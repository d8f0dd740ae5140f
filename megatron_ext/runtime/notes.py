"""What is said at start or when a choice falls: each line once, by the first rank."""

from __future__ import annotations

import os

_said: set[str] = set()


def say_once(line: str) -> None:
    """Print a line unless it was said in this process, or another rank says it."""
    if line in _said:
        return
    _said.add(line)
    # torchrun's number: the first line comes before the process groups.
    if os.environ.get("RANK", "0") == "0":
        print(f"[moe] {line}", flush=True)
