"""What a check found, and the verdict over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table

from megatron_ext import screen

Status = Literal["good", "warning", "bad", "unknown", "skipped"]
Verdict = Literal["good", "bad", "unknown"]
# As the house's exit codes: good, the thing asked about is wrong, could not check.
EXIT_CODES: dict[Verdict, int] = {"good": 0, "bad": 1, "unknown": 2}
_COLOURS: dict[Status, str] = {
    "good": "green",
    "warning": "yellow",
    "bad": "bold red",
    "unknown": "magenta",
    "skipped": "dim",
}


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Args:
        check: Which check, e.g. "all-to-all".
        where: Node, rank, pair or file.
        status: "unknown" means that it should have been checked and could not be; "skipped" that it doesn't apply.
        value: What was measured or read.
        why: What it was held against.
        remedy: What to do next; empty where nothing is to be done.
    """

    check: str
    where: str
    status: Status
    value: str
    why: str = ""
    remedy: str = ""


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    """Return "bad" if anything is, else "unknown" if anything is or nothing was checked at all, else "good"."""
    statuses = {finding.status for finding in findings}
    if "bad" in statuses:
        return "bad"
    return "unknown" if "unknown" in statuses or not statuses & {"good", "warning"} else "good"


def to_plain(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the findings as JSON values."""
    return [asdict(finding) for finding in findings]


def print_table(findings: Sequence[Finding]) -> None:
    """Print one table, the remedies of what is not good, and the verdict."""
    table = Table()
    for name in ("check", "where", "status", "value", "held against"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.status]
        table.add_row(
            finding.check, finding.where, f"[{colour}]{finding.status}[/]", _plain(finding.value), _plain(finding.why)
        )
    console = screen.console()
    console.print(table)
    for finding in findings:
        if finding.status in ("bad", "unknown", "warning") and finding.remedy:
            console.print(f"{finding.status}: {finding.check} on {finding.where}: {_plain(finding.remedy)}")
    console.print(f"verdict: {verdict_of(findings)}")


def _plain(text: str) -> str:
    # Logs and NCCL's "[0]" would read as rich's markup.
    return text.replace("[", r"\[")
