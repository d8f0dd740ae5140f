"""Print what the traces say, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_ext.trace import kinds
from megatron_ext.trace.advice import first_look
from megatron_ext.trace.ranks import Comparison
from megatron_ext.trace.summary import RankSummary, work_kinds

# More columns than these do not fit; the table then has the least, the mean and the most.
_RANK_COLUMNS = 4
_NAME_WIDTH = 60


def show(
    ranks: Sequence[RankSummary], comparison: Comparison | None, notes: Sequence[str], console: Console, *,
    detail: int | None = None, top: int = 10,
) -> None:  # fmt: skip
    """Print the tables and the last line.

    Args:
        ranks: Of one run, at least one.
        comparison: Of the ranks; None for one.
        notes: What the reader should know about the files.
        console: Where to print.
        detail: Rank whose gaps, waits and kernels are listed; None for the one that idles most.
        top: Rows of each of these lists.
    """
    for rank in ranks:
        _say(console, _headline(rank))
    if not ranks[0].device:
        _say(console, "no GPU in the trace: these are operators on the host by their own time, without what they call")
    for note in notes:
        _say(console, f"note: {note}")
    console.print(_account(ranks))
    if any(rank.communication.collectives for rank in ranks):
        console.print(_communication(ranks))
    if comparison is not None:
        _show_comparison(ranks, comparison, console)
    chosen = next((rank for rank in ranks if rank.rank == detail), None) or max(ranks, key=lambda r: r.idle_ns)
    _show_detail(chosen, console, top)
    _say(console, first_look(ranks, comparison).text())


def _headline(rank: RankSummary) -> str:
    what, each = "no step is marked, so from the first event to the last", ""
    if len(rank.steps) == 1:
        what = f"step {rank.steps[0]} of the profiler"
    elif rank.steps:
        what = f"steps {rank.steps[0]} to {rank.steps[-1]} of the profiler"
        each = f", {_ms(rank.span_ns / len(rank.steps))} ms each"
    return f"rank {rank.rank}: {what}, {_ms(rank.span_ns)} ms{each}  ({rank.path})"


def _account(ranks: Sequence[RankSummary]) -> Table:
    table = Table(title="where the span went (ms; each moment counted once)", title_justify="left")
    table.add_column("kind")
    many = len(ranks) > _RANK_COLUMNS
    heads = ["least", "mean", "most"] if many else [f"rank {rank.rank}" for rank in ranks]
    for head in heads:
        table.add_column(head, justify="right")
    for head in ("share", "own time", "count"):
        table.add_column(head, justify="right")
    for kind in work_kinds(ranks):
        rows = [next((row for row in rank.rows if row.kind == kind), None) for rank in ranks]
        spans = [row.span_ns if row else 0 for row in rows]
        busy = sum(row.busy_ns for row in rows if row) / len(ranks)
        count = sum(row.count for row in rows if row) / len(ranks)
        shown = _spread(spans) if many else [_ms(value) for value in spans]
        share = sum(spans) / sum(rank.span_ns for rank in ranks)
        table.add_row(kind, *shown, f"{share:.1%}", _ms(busy), f"{count:,.0f}")
    spans = [rank.span_ns for rank in ranks]
    table.add_section()
    table.add_row("span", *(_spread(spans) if many else [_ms(value) for value in spans]), "100.0%", "", "")
    return table


def _spread(values: Sequence[float]) -> list[str]:
    return [_ms(min(values)), _ms(sum(values) / len(values)), _ms(max(values))]


def _communication(ranks: Sequence[RankSummary]) -> Table:
    of = "mean of the ranks; " if len(ranks) > 1 else ""
    table = Table(title=f"communication ({of}ms)", title_justify="left")
    table.add_column("collective")
    for head in ("count", "total", "hidden", "exposed", "MB", "bus GB/s"):
        table.add_column(head, justify="right")
    for kind in kinds.COMMUNICATION:
        parts = [part for rank in ranks for part in rank.communication.collectives if part.kind == kind]
        if not parts:
            continue
        sized = [part for part in parts if part.bytes]
        table.add_row(
            kind,
            f"{sum(part.count for part in parts) / len(ranks):,.0f}",
            *(_ms(sum(values) / len(ranks)) for values in (
                [part.total_ns for part in parts], [part.hidden_ns for part in parts],
                [part.exposed_ns for part in parts])),
            f"{sum(part.bytes for part in parts) / len(ranks) / 1e6:,.1f}" if sized else "-",
            f"{sum(part.gbps for part in sized) / len(sized):.1f}" if sized else "-",
        )  # fmt: skip
    every = [rank.communication for rank in ranks]
    table.add_section()
    table.add_row("any", "", *(_ms(sum(values) / len(ranks)) for values in (
        [one.total_ns for one in every], [one.hidden_ns for one in every], [one.exposed_ns for one in every])), "", "",
    )  # fmt: skip
    return table


def _show_comparison(ranks: Sequence[RankSummary], comparison: Comparison, console: Console) -> None:
    for note in comparison.notes:
        _say(console, f"note: {note}")
    if comparison.arrivals:
        table = Table(title="who keeps whom waiting in collectives (ms, over the span)", title_justify="left")
        for head in ("rank", "waits for others", "others wait for it", "clock"):
            table.add_column(head, justify="right")
        table.add_column("comes last in")
        for at, rank in enumerate(ranks):
            table.add_row(
                str(rank.rank),
                _ms(comparison.waited_ns[at]),
                _ms(comparison.caused_ns[at]),
                f"{comparison.offsets_ns[at] / 1e3:+,.0f} us",
                ", ".join(f"{one.last[at]} of {one.count} {one.kind}" for one in comparison.arrivals if one.last[at]),
            )
        console.print(table)
    if comparison.experts_ns:
        each = zip(ranks, comparison.experts_ns, strict=True)
        times = ", ".join(f"rank {rank.rank} {_ms(took)}" for rank, took in each)
        above = f"the longest is {comparison.imbalance:.1%} above the mean"
        _say(console, f"grouped GEMMs of the experts: {times} ms; {above}")


def _show_detail(rank: RankSummary, console: Console, top: int) -> None:
    what = "kernel" if rank.device else "operator"
    table = Table(title=f"rank {rank.rank}: longest {what}s", title_justify="left")
    table.add_column(what, overflow="ellipsis", no_wrap=True, max_width=_NAME_WIDTH)
    table.add_column("kind")
    table.add_column("own time", justify="right")
    table.add_column("count", justify="right")
    for named in rank.names[:top]:
        table.add_row(_plain(named.name), named.kind, _ms(named.total_ns), f"{named.count:,}")
    console.print(table)
    if rank.gaps:
        title = f"rank {rank.rank}: longest gaps of the GPU (ms)"
        table = Table("at", "idle", "between", "host", title=title, title_justify="left")
        for gap in rank.gaps[:top]:
            between = f"{_plain(gap.before) or 'begin'}\n{_plain(gap.after) or 'end'}"
            waited = f"\nafter {_plain(gap.wait)}" if gap.wait else ""
            table.add_row(_ms(gap.at_ns), _ms(gap.took_ns), between, f"{_plain(gap.host)}{waited}")
        console.print(table)
        waited = _ms(rank.idle_after_wait_ns)
        _say(console, f"idle {_ms(rank.idle_ns)} ms in all, {waited} of it after the host waited for the GPU, the rest "
             "while the host prepared the next kernels")  # fmt: skip
    if rank.waits:
        table = Table(title=f"rank {rank.rank}: the host waits for the GPU (ms)", title_justify="left")
        table.add_column("call")
        table.add_column("from", overflow="fold")
        for head in ("total", "longest", "count"):
            table.add_column(head, justify="right")
        for wait in rank.waits[:top]:
            table.add_row(wait.call, _plain(wait.place), _ms(wait.total_ns), _ms(wait.longest_ns), f"{wait.count:,}")
        console.print(table)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _plain(text: str) -> str:
    # Names of kernels hold brackets, which are rich's markup.
    return text.replace("[", r"\[")


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.2f}"
