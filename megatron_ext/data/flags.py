"""The training flag of this room: which manifest a run's data must match."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--moe-ext-manifest` to Megatron's parser (`args.moe_ext_manifest`, a path or None)."""
    group = parser.add_argument_group(title="moe-ext data")
    group.add_argument(
        "--moe-ext-manifest",
        metavar="PATH",
        help="manifest.json of the tokenized corpus: tokenizer and data flags are held against it before step 1",
    )
