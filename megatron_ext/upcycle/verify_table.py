"""Show a verification in tables: verdict, losses, layers, experts, routers."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from megatron_ext import screen
from megatron_ext.upcycle.verify import Promise, Report

PROMISES = {
    "exact": "the same function",
    "close": "nearly the same function",
    "scaled": "the output of every MoE layer's MLP times {scale:.4g}",
    "changed": "another function; nothing is promised about its loss",
}


def show(report: Report, source: Path, target: Path) -> None:
    """Print the report; the verdict comes last."""
    console = screen.console(soft_wrap=True, highlight=False)
    console.print(_summary(report, source, target))
    console.print(_layers(report), _experts(report))
    if report.routing.source:
        console.print(_routing(report))
    if report.good:
        console.print("verdict: as promised")
        return
    console.print("verdict: NOT as promised")
    for reason in report.reasons:
        console.print(f"  {reason}", markup=False)


def promise_text(promise: Promise) -> str:
    """Return a promise in words."""
    return f"{promise.kind}: {PROMISES[promise.kind].format(scale=promise.scale)}"


def _summary(report: Report, source: Path, target: Path) -> Table:
    gaps, found = report.differences, report.survey
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("source", str(source))
    table.add_row("target", str(target))
    table.add_row("promised", promise_text(report.promise))
    table.add_row("", f"because {report.promise.why}")
    bound = "" if report.loss_bound is None else f", promised within {report.loss_bound:.2g}"
    table.add_row("loss", f"{gaps.source_loss:.6f} and {gaps.target_loss:.6f}: "
                  f"{gaps.target_loss - gaps.source_loss:+.3g}{bound}")
    table.add_row("logits", f"largest difference {gaps.logit_max:.3g}, mean {gaps.logit_mean:.3g}")
    rounded = f", {found.rounded} but for rounding" if found.rounded else ""
    table.add_row("weights", f"{found.tensors - len(found.wrong)} of {found.tensors} blocks as the options make them"
                  f"{rounded}")
    return table


def _layers(report: Report) -> Table:
    table = Table("layer", "kind", "whole run", "alone", "MLP alone", "MLP factor",
                  title="difference of outputs, relative (alone: on the source's input)", title_justify="left")
    for one in report.differences.layers:
        table.add_row(one.layer, "MoE" if one.moe else "dense", f"{one.hidden:.2e}", f"{one.alone:.2e}",
                      f"{one.mlp:.2e}", f"{one.mlp_scale:.5f}")
    return table


def _experts(report: Report) -> Table:
    idle = {one.layer: str(one.idle) for one in report.routing.target}
    table = Table("layer", "experts", "distinct", "as made", "silent", "norm min", "mean", "max", "idle on the batch",
                  title="experts", title_justify="left")
    for one in report.survey.experts:
        table.add_row(one.layer, str(one.count), f"{one.distinct} of {one.expected_distinct}", str(one.kept),
                      str(one.silent), f"{one.norm_min:.4g}", f"{one.norm_mean:.4g}", f"{one.norm_max:.4g}",
                      idle.get(one.layer, "not run"))
    return table


def _routing(report: Report) -> Table:
    table = Table("layer", "tied: source", "exact copies", "now", "twins: exact copies", "now", "origins: source",
                  "exact copies", "now", title_justify="left",
                  title="routers (tied: tokens with a choice between equal logits; twins: tokens with two experts of "
                  "the same weights; origins: the source's experts behind a token's choices)")
    routing = report.routing
    for old, exact, new in zip(routing.source, routing.exact_copies, routing.target, strict=True):
        table.add_row(old.layer, f"{old.tied:.1%}", f"{exact.tied:.1%}", f"{new.tied:.1%}", f"{exact.twins:.1%}",
                      f"{new.twins:.1%}", f"{old.origins:.2f}", f"{exact.origins:.2f}", f"{new.origins:.2f}")
    return table
