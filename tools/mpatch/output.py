"""What a verb answers: lines for people, data for programs, an exit status for both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """The answer of a verb. `data` must be plain values: it is printed by `--json`."""

    lines: list[str]
    data: dict[str, Any] = field(default_factory=dict)
    exit_code: int = 0
