"""What a dump gave: one row a step and layer, metrics by name, as a table for people or plain values for programs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ext.observe.names import METRICS


@dataclass(frozen=True)
class DumpRow:
    """One layer at one step. `layer` is the name that the dump gives it: "3", or "mtp 0.1" for an MTP layer."""

    step: int
    layer: str
    values: dict[str, float]


@dataclass(frozen=True)
class DumpTable:
    """Rows of one kind of dump, with notes on what they can't say."""

    kind: str
    rows: list[DumpRow]
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain values; a value that can't be had is null."""
        rows = [{"step": row.step, "layer": row.layer, **_plain(row.values)} for row in self.rows]
        return {"kind": self.kind, "notes": self.notes, "rows": rows}

    def show(self, console: Console) -> None:
        """Print the table."""
        metrics = list(dict.fromkeys(name for row in self.rows for name in row.values))
        table = Table("step", "layer", *(METRICS[name].title for name in metrics), title=self.kind)
        for row in self.rows:
            table.add_row(str(row.step), row.layer, *(f"{row.values.get(name, math.nan):.4g}" for name in metrics))
        console.print(table)
        for note in self.notes:
            console.print(note)


def _plain(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
