"""Start an MoE from a dense model, or a larger MoE from a smaller one: files in, files out."""

from __future__ import annotations

from argparse import ArgumentParser


def add_arguments(parser: ArgumentParser) -> None:
    """Add our flags to Megatron's parser."""
    from megatron_ext.upcycle import in_training

    in_training.add_arguments(parser)
