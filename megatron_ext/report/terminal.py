"""The same in the terminal: a table and the sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_ext.report import facts
from megatron_ext.report.first_look import findings
from megatron_ext.report.summary import summary_rows
from megatron_ext.report.view import View

# Title, field, and the width of terminal below which the column is left out.
_COLUMNS = (
    ("run", "label", 0),
    ("kind", "kind", 130),
    ("steps", "steps", 100),
    ("tokens", "tokens", 0),
    ("loss", "train_loss", 0),
    ("held out", "held_out", 0),
    ("step time", "step_time", 110),
    ("MaxVio", "max_vio", 0),
    ("alarms", "alarms", 0),
)


def show(views: Sequence[View], console: Console) -> None:
    """Print one row a run and what the numbers say; columns that no run fills are left out."""
    rows = summary_rows(views)
    table = Table()
    columns = [
        (title, name)
        for title, name, width in _COLUMNS
        if console.width >= width and any(str(getattr(row, name)) for row in rows)
    ]
    for title, name in columns:
        words = name in ("label", "kind")
        table.add_column(title, overflow="fold", justify="left" if words else "right", no_wrap=not words)
    for row in rows:
        # A name like "moe[aux]" is text, not markup.
        table.add_row(*[Text(str(getattr(row, name))) for _, name in columns])
    console.print(table)
    if any(row.train_loss for row in rows):
        console.print("loss: the first step's → the mean of the last twentieth of the steps", highlight=False)
    for sentence in [*findings(views), *facts.loss_sentences(views), *facts.max_vio_sentences(views)]:
        console.print(f"- {sentence}", highlight=False, markup=False)
