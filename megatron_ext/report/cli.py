"""`megatron-moe report`: the table, the page, and the import into Trackio."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from megatron_ext.errors import UserError
from megatron_ext.report import html, terminal
from megatron_ext.report.summary import summary_rows
from megatron_ext.report.view import View, load_views
from megatron_ext.tracking import TrackingOptions
from megatron_ext.tracking.feeder import NOTICE, child_environment
from megatron_ext.tracking.options import DEFAULT_PROJECT
from megatron_ext.tracking.rundir import read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("run_dir", nargs="+", type=Path, help="a run directory (--moe-ext-run-dir of its training)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the page here (default: only the table)"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument(
        "--import",
        dest="bring",
        action="store_true",
        help="bring the runs into Trackio: what is missing there is added, nothing twice",
    )
    parser.add_argument(
        "--trackio-dir",
        type=Path,
        metavar="DIR",
        help="with --import: Trackio's folder (default: the run's own, else `trackio` beside it)",
    )


def run(args: argparse.Namespace) -> int:
    """Make the report or the import; return the exit status.

    Raises:
        UserError: A directory holds no run, the page cannot be written, or Trackio did not take the rows.
    """
    if args.bring:
        for run_dir in args.run_dir:
            print(bring_into_trackio(run_dir, args.trackio_dir))
        return 0
    views = load_views(list({path.resolve(): path for path in args.run_dir}.values()))  # each run once
    if args.json:
        print(json.dumps([asdict(row) for row in summary_rows(views)], indent=2))
    else:
        terminal.show(views, Console())
    if args.output is not None:
        size = html.write(views, args.output)
        print(
            f"{args.output}: {size / 1e6:.1f} MB, opens in any browser, needs no network",
            file=sys.stderr if args.json else sys.stdout,
        )
    _warn_skipped(views)
    return 0


def bring_into_trackio(run_dir: Path, trackio_dir: Path | None) -> str:
    """Import one run and return a sentence about it.

    Raises:
        UserError: The directory holds no run, or Trackio did not take all rows.
    """
    info = read_run(run_dir, routing=False).info
    config = info.config
    folder = trackio_dir or config.get("moe_ext_trackio_dir") or run_dir.absolute().parent / "trackio"
    options = TrackingOptions(
        run_dir=run_dir.absolute(),
        run_name=info.name,
        project=info.project or DEFAULT_PROJECT,
        group=info.group,
        trackio_dir=Path(folder).absolute(),
    )
    # A process of its own: Trackio takes its folder from the environment when it is imported.
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ext.tracking.feed", json.dumps(options.to_plain()), "--once"],
        env=child_environment(options),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        why = done.stdout.removeprefix(NOTICE).strip() or done.stderr.strip().splitlines()[-1:] or ["it gave no reason"]
        raise UserError(
            "Trackio did not take the run",
            where=f"{run_dir} into {folder}",
            why=why if isinstance(why, str) else why[0],
            remedy="mend that and run the same command again; nothing is added twice",
        )
    result = json.loads(done.stdout)
    return (
        f"{run_dir}: Trackio run {result['name']} in project {options.project}: {result['added']} rows added, "
        f"{result['removed']} taken out, {result['present']} were there"
    )


def _warn_skipped(views: list[View]) -> None:
    for view in views:
        if view.run.skipped_lines:
            print(
                f"note: {view.run.path}: {view.run.skipped_lines} unreadable line(s) skipped (a killed or full write)",
                file=sys.stderr,
            )
