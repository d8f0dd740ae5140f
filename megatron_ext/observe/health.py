"""`megatron-moe health`: how a run is doing, from its run directory, while it goes on or after it is over.

Reads files only: never the tracker and never the process. Exit status 1 where an alarm stands. With `--from`, the same
metrics from what Megatron itself dumps (`dumps/`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_ext import screen
from megatron_ext.errors import UserError
from megatron_ext.observe import names
from megatron_ext.observe.sink import CLEARED, alarm_key
from megatron_ext.tracking.lines import number
from megatron_ext.usage import whole

# What a person looks at first, with the part of the key that is shown.
_SHOWN = (
    ("lm_loss", ""),
    ("max_vio", "max"),
    ("rank_max_vio", "max"),
    ("dead_share", "max"),
    ("z_rms", "max"),
    ("flip_rate", "max"),
    ("flip_rate_bf16", "max"),
    ("max1_over_max2", "min"),
    ("expert_norm_max_over_median", "max"),
    ("expert_norm_min_over_median", "min"),
    ("shared_share", "mean"),
    ("source_information", "mean"),
    ("step_time", ""),
    ("tokens_per_s", ""),
    ("peak_memory", "max"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("run_dir", nargs="?", type=Path, help="the run's --moe-ext-run-dir")
    parser.add_argument(
        "--from",
        dest="dump",
        type=Path,
        metavar="PATH",
        help="instead of a run directory: Megatron's tokens_per_expert/ folder, a routing trace folder, an "
        "activations/iter_N folder, or a checkpoint's iter_N folder (expert bias)",
    )
    parser.add_argument("--num-experts", type=whole(0), default=0, help="experts a layer, for a routing trace")
    parser.add_argument("--expert-parallel", type=whole(), default=1, help="--expert-model-parallel-size of that run")
    parser.add_argument(
        "--micro-batch-size",
        type=whole(0),
        default=0,
        help="of that run: a trace's tokens are then told apart by sequence",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the state of a run; return 1 where an alarm stands, else 0.

    Raises:
        UserError: not exactly one run or dump was named, or it cannot be read.
    """
    if (args.run_dir is None) == (args.dump is None):
        raise UserError(
            "health looks at one thing", where="RUN_DIR, --from PATH", remedy="name one of the two", exit_code=64
        )
    if args.dump is not None:
        from megatron_ext.observe.dumps import read_dump

        table = read_dump(args.dump, args.num_experts, args.expert_parallel, args.micro_batch_size)
        print(json.dumps(table.as_json())) if args.json else table.show(screen.console())
        return 0
    state = health_of(args.run_dir)
    print(json.dumps(state)) if args.json else _show(state, screen.console())
    return 1 if state["alarms"] else 0


def health_of(run_dir: Path, now: float | None = None) -> dict[str, Any]:
    """Return a run's state as plain values: last step, its age in seconds, standing alarms, values then and now.

    Raises:
        UserError: There is no run in this directory.
    """
    from megatron_ext.tracking.rundir import read_run

    found = read_run(run_dir, routing=False)
    last = found.rows[-1] if found.rows else None
    return {
        "run_dir": str(run_dir),
        "name": found.info.name,
        "step": last.step if last else None,
        "age_s": round((time.time() if now is None else now) - last.time, 1) if last else None,
        "alarms": standing(found.alarms),
        "values": _values(found.rows),
        "skipped_lines": found.skipped_lines,
    }


def standing(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the alarms that stand at the end of `alarms.jsonl`: the last word on each (name, layer)."""
    last: dict[tuple[Any, Any], Mapping[str, Any]] = {}
    for record in records:
        last[alarm_key(record)] = record
    return [dict(record) for record in last.values() if record.get("state") != CLEARED]


def _values(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return metric, key, first and last value (and the layer it is from) of what is shown."""
    out = []
    for metric, part in _SHOWN:
        key = _key(metric, part)
        steps = [row for row in rows if key in row.metrics]
        if steps:
            first, last = steps[0], steps[-1]
            layer = last.metrics.get(f"{key}_layer") if part in ("max", "min") else None
            out.append(
                {
                    "metric": metric,
                    "part": part,
                    "first": number(first.metrics[key]),
                    "first_step": first.step,
                    "last": number(last.metrics[key]),
                    "last_step": last.step,
                    "layer": None if layer is None else int(layer),
                }
            )
    return out


def _key(metric: str, part: str) -> str:
    known = names.METRICS[metric]
    if known.megatron_tag and metric != "step_time":
        return known.megatron_tag
    return names.aggregate_key(metric, part) if known.per_layer else names.step_key(metric, part)


def _show(state: Mapping[str, Any], console: Console) -> None:
    if state["step"] is None:
        console.print(f"{state['run_dir']}: no step recorded yet", markup=False)
        return
    name = state["name"] or state["run_dir"]
    console.print(f"{name}: step {state['step']}, {_age(state['age_s'])} ago", markup=False)
    if state["alarms"]:
        table = Table("alarm", "where", "measure", "limit", "since", title="Alarms that stand")
        for alarm in state["alarms"]:
            value = f"{alarm.get('metric', '')} {_short(alarm.get('value'))}"
            words = (
                alarm["name"],
                _where(alarm),
                value,
                _short(alarm.get("limit")),
                f"step {alarm.get('since_step', '?')}",
            )
            table.add_row(*map(Text, words))
        console.print(table)
        tries = {(alarm["name"], alarm.get("remedy", ""), alarm.get("link", "")) for alarm in state["alarms"]}
        for name, remedy, link in sorted(tries):
            console.print(f"{name}: {remedy} ({link})", highlight=False, markup=False)
    else:
        console.print("no alarm stands")
    if not any(names.METRICS[row["metric"]].per_layer for row in state["values"]):
        console.print("no routing metrics: a dense model, or --moe-ext-observe-interval 0")
    table = Table("metric", "first", "last", "layer", "what it says")
    for row in state["values"]:
        known = names.METRICS[row["metric"]]
        layer = "" if row["layer"] is None else str(row["layer"])
        title = f"{known.title} ({row['part']})" if row["part"] else known.title
        first, last = (_reading(row[time], known.unit) for time in ("first", "last"))
        unit = "" if known.unit == "bytes" else known.unit
        table.add_row(title, first, f"{last} {unit}".rstrip(), layer, known.meaning)
    console.print(table)


def _reading(value: float | str | None, unit: str) -> str:
    """Return a number as people say it; bytes bring their unit along."""
    number = math.nan if value is None else float(value)
    if unit == "bytes":
        return f"{number / 2**30:.2f} GiB"
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e9 else _short(value)


def _where(alarm: Mapping[str, Any]) -> str:
    parts = (("layer", alarm.get("layer")), ("expert", alarm.get("expert")), ("EP rank", alarm.get("rank")))
    return "\n".join(f"{word} {value}" for word, value in parts if value is not None) or "whole step"


def _short(value: float | str | None) -> str:
    """Return a number for people; nan and infinities come as strings, as in the files (null in older ones)."""
    return "not finite" if value is None else f"{float(value):.4g}"


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
