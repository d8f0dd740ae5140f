"""Say in words what an upcycling does and what to expect of the first loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_ext.upcycle.target import Block, Content

KINDS = {
    "exact": "the first loss equals the dense model's (1e-5 in fp32, 1e-3 in bf16)",
    "close": "the first loss is near the dense model's, not equal",
    "changed": "the function changes; expect a higher first loss",
}


def explain(note: Mapping[str, Any], num_bytes: int) -> None:
    """Print what will be made, with the reason for each choice."""
    moe, dense, factors = note["moe"], note["dense"], note["factors"]
    rule = moe["rule"]
    count = note["granularity"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("from", f"{note['source']} ({note['consumed_train_samples']} samples consumed)")
    table.add_row("layers", f"{sum(moe['moe_layers'])} of {dense['num_layers']} become MoE layers")
    table.add_row("experts", f"{rule['num_experts']} of width {moe['ffn']}, top-{rule['topk']}: {_slices(count, rule)}")
    table.add_row("scaling", _factors(moe["scaling"], factors))
    table.add_row("router", _router(moe, note["router_std"], count))
    if moe["shared_ffn"]:
        table.add_row("shared", f"width {moe['shared_ffn']}, last projection zero: no effect until it learns")
    table.add_row("size", f"{num_bytes / 1e9:.2f} GB, without optimizer state")
    table.add_row("expect", f"{note['expectation']['kind']}: {KINDS[note['expectation']['kind']]}")
    table.add_row("", f"because {note['expectation']['why']}")
    Console(soft_wrap=True).print(table)


def progress_bar(content: Content, *, quiet: bool) -> tuple[Progress, Callable[[Block], None]]:
    """Return a progress display on stderr and the function that moves it, by bytes."""
    console = Console(stderr=True, quiet=quiet)
    display = Progress(TextColumn("writing"), BarColumn(), TextColumn("{task.completed:.1f} of {task.total:.1f} GB"),
                       TimeRemainingColumn(), console=console, transient=True, disable=quiet or not console.is_terminal)
    task = display.add_task("writing", total=content.num_bytes / 1e9)
    return display, lambda block: display.advance(task, block.num_bytes / 1e9)


def _slices(count: int, rule: Mapping[str, Any]) -> str:
    copies = rule["num_experts"] // count
    if count == 1:
        return "each a full copy of the dense MLP"
    return f"the dense MLP in {count} slices, {copies} times; a token picks {rule['topk'] // count} whole of {copies}"


def _factors(name: str, factors: Mapping[str, float]) -> str:
    changed = [f"{part} x {value:g}" for part, value in factors.items() if value != 1]
    return f"{name} ({', '.join(changed) or 'every weight as it is'})"


def _router(moe: Mapping[str, Any], std: float, count: int) -> str:
    shared = f", a row for each {count} slices" if count > 1 else ""
    return f"rows from N(0, {std:.3g}), seed {moe['seed']}{shared}"
