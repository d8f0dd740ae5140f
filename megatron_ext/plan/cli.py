"""`megatron-moe plan SUBJECT`: one subject, one module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib

SUBJECTS = {
    "dispatch": ("megatron_ext.plan.dispatch_cli", "traffic and time of the token dispatchers"),
    "layout": ("megatron_ext.plan.layout_cli", "over how many ranks the experts should lie, with which micro-batch"),
    "memory": ("megatron_ext.plan.memory_cli", "peak GPU memory of a training command"),
    "upcycle": ("megatron_ext.plan.upcycle_cli", "is upcycling worth it, and how large is the result"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subjects."""
    subjects = parser.add_subparsers(dest="subject", required=True)
    for name, (module, summary) in SUBJECTS.items():
        importlib.import_module(module).add_arguments(subjects.add_parser(name, help=summary, description=summary))


def run(args: argparse.Namespace) -> int:
    """Run the subject."""
    return int(importlib.import_module(SUBJECTS[args.subject][0]).run(args))
