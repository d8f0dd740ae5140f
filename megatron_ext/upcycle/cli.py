"""`megatron-moe upcycle SOURCE TARGET`: an MoE checkpoint from a dense one, or a larger MoE from an MoE, on one CPU."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from megatron_ext.upcycle import flags
from megatron_ext.upcycle.source import Source
from megatron_ext.upcycle.target import Content

USAGE = """\
Examples: 8 experts of full width, two a token; then twice as many experts:

  megatron-moe upcycle runs/dense/checkpoints runs/moe/checkpoints --num-experts 8 --router-topk 2
  megatron-moe upcycle runs/moe/checkpoints runs/larger/checkpoints --num-experts 16 --new-experts drop

Then train with --load on the new folder and the same MoE flags; --moe-use-upcycling stays off.
`megatron-moe upcycle verify SOURCE TARGET` runs both on one batch and says whether the result is as expected.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = USAGE
    parser.add_argument("source", type=Path, help="folder that the dense (or smaller MoE) run saved to: torch_dist")
    parser.add_argument("target", type=Path, help="new folder for the MoE checkpoint")
    flags.add_shape_flags(parser)
    flags.add_choice_flags(parser)
    flags.add_growth_flags(parser)
    parser.add_argument("--dry-run", action="store_true", help="check and explain; write nothing")
    parser.add_argument("--json", action="store_true", help="print the result for programs")
    parser.set_defaults(parser=parser)


def run(args: Namespace) -> int:
    """Upcycle; return 0.

    Raises:
        UserError: what was asked for cannot be made of that checkpoint, or not there.
    """
    from megatron_ext.upcycle import explain, offline
    from megatron_ext.upcycle.source import open_source
    from megatron_ext.upcycle.write import write

    source = open_source(args.source)
    where = offline.place_in_run(source, carry_schedule=args.carry_schedule)
    content = _plan(source, args)
    note = {**content.notes[offline.NOTE], "bytes": content.num_bytes}
    return write(args, content, folder=where.folder, tracker=where.tracker, note=note,
                 tell=lambda: explain.explain(note, content.num_bytes))


def _plan(source: Source, args: Namespace) -> Content:
    """Plan what the flags ask for; the source decides which of the two it is."""
    from megatron_ext.upcycle import grow, grow_spec, offline
    from megatron_ext.upcycle import spec as specs

    if getattr(source.args, "num_experts", None):
        moe = grow_spec.moe_from_args(source.args)
        growth = flags.growth_from_flags(args, moe, args.parser)
        return grow.plan_content(source, moe, growth, carry_schedule=args.carry_schedule,
                                 restart_data=args.restart_data)
    dense = specs.dense_from_args(source.args)
    wish = flags.spec_from_flags(args, dense, args.parser)
    specs.check(dense, wish)
    return offline.plan_content(source, dense, wish, carry_schedule=args.carry_schedule,
                                restart_data=args.restart_data)
