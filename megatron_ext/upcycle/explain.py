"""Say in words what an upcycling does and what to expect of the first loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_ext import screen
from megatron_ext.upcycle.target import Block, Content

KINDS = {
    "exact": "the first loss equals the source's (1e-5 in fp32, 1e-3 in bf16)",
    "close": "the first loss is near the source's, not equal",
    "changed": "the function changes; expect a higher first loss",
}


def explain(note: Mapping[str, Any], num_bytes: int) -> None:
    """Print what will be made, with the reason for each choice."""
    table = _growth(note) if "growth" in note else _from_dense(note)
    table.add_row("size", f"{num_bytes / 1e9:.2f} GB, without optimizer state")
    table.add_row("expect", f"{note['expectation']['kind']}: {KINDS[note['expectation']['kind']]}")
    table.add_row("", f"because {note['expectation']['why']}")
    screen.console(soft_wrap=True).print(table)


def _from_dense(note: Mapping[str, Any]) -> Table:
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
    return table


def _growth(note: Mapping[str, Any]) -> Table:
    growth, rule = note["growth"], note["smaller"]["rule"]
    times, total = growth["multiple"], growth["multiple"] * rule["num_experts"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("from", f"{note['source']} ({note['consumed_train_samples']} samples consumed)")
    word = "new" if growth["new_experts"] == "random" else "copy" if times == 2 else "copies"
    table.add_row("experts", f"{rule['num_experts']} become {total}: beside each {times - 1} {word}")
    table.add_row("top-k", f"{growth['topk']} of {total} (before: {rule['topk']} of {rule['num_experts']})")
    table.add_row("new ones", _new_experts(growth))
    if growth["new_experts"] != "random":
        table.add_row("router", _perturbation(growth))
    return table


def _new_experts(growth: Mapping[str, Any]) -> str:
    noise = f", noise of {growth['expert_noise']:g} of each tensor" if growth["expert_noise"] else ""
    return {
        "copy": f"copies{noise}",
        "drop": f"copies with {growth['drop_share']:.0%} of their channels drawn anew from the statistics of what they "
        f"replace (Drop-Upcycling, arXiv 2502.19261){noise}",
        "random": "drawn as Megatron initializes, their router rows too",
    }[growth["new_experts"]]


def _perturbation(growth: Mapping[str, Any]) -> str:
    parts = [f"noise of {growth['router_noise']:g} of each row"] if growth["router_noise"] else []
    parts += [f"a shift of {growth['router_shift']:g} rows for each set of copies"] if growth["router_shift"] else []
    equal = "the rows again, unchanged: copies get the same logits"
    if growth["new_experts"] == "copy" and not growth["expert_noise"]:
        equal += " and the same gradients, so they never part"
    return f"the rows again, with {' and '.join(parts)}" if parts else equal


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
