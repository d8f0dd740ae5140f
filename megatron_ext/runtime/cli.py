"""`megatron-moe train`: one rank's training; `torchrun` starts one such process a rank."""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser, Namespace

USAGE = """\
All of Megatron's flags pass through untouched; ours start with --moe-ext-. For several ranks:

  torchrun --nproc-per-node 2 --no-python megatron-moe train -- MEGATRON FLAGS
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's own arguments; everything after `--` is Megatron's."""
    parser.epilog = USAGE
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="auto: a GPU where there is one, else the CPU runtime (default)",
    )
    parser.add_argument("flags", nargs=REMAINDER, metavar="-- MEGATRON FLAGS")


def run(args: Namespace) -> int:
    """Train; return 0 when Megatron ends well."""
    from megatron_ext.runtime.pretrain import train

    flags = args.flags[1:] if args.flags[:1] == ["--"] else args.flags
    train(flags, asked_device=args.device)
    return 0
