"""`megatron-moe upcycle verify SOURCE TARGET`: both models on one batch, the weights bit for bit, and a verdict."""

from __future__ import annotations

import json
import logging
import math
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import UserError

if TYPE_CHECKING:
    from megatron_ext.upcycle.compare import Batch
    from megatron_ext.upcycle.source import Source
    from megatron_ext.upcycle.verify import Report

USAGE = """\
Example:

  megatron-moe upcycle verify runs/dense/checkpoints runs/moe/checkpoints

Runs on the CPU in fp32, one model after the other, so memory holds the larger one once. Reads both checkpoints without
running code from them. Exit status: 0 as promised, 1 not, 64 the two cannot be compared.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = USAGE
    parser.add_argument("source", type=Path, help="folder that was upcycled")
    parser.add_argument("target", type=Path, help="folder that `megatron-moe upcycle` made of it, before training")
    parser.add_argument("--data", type=Path, metavar="PREFIX",
                        help="take the batch from Megatron's PREFIX.bin/.idx (default: random tokens)")
    parser.add_argument("--sequences", type=int, default=4, metavar="B", help="sequences in the batch (default 4)")
    parser.add_argument("--seq-length", type=int, default=64, metavar="S", help="tokens a sequence (default 64)")
    parser.add_argument("--seed", type=int, default=1234, help="of the random tokens (default 1234)")
    parser.add_argument("--json", action="store_true", help="print the result for programs")


def run(args: Namespace) -> int:
    """Verify; return 0 where everything is as promised, else 1."""
    _quiet()
    from megatron_ext.upcycle import model

    try:
        with model.one_rank():
            source, target, report = _verified(args)
    except UserError as error:
        # Status 1 is a verdict; whatever keeps us from one is another status.
        error.exit_code = 64
        raise
    if args.json:
        print(json.dumps(as_json(report)))
    else:
        from megatron_ext.upcycle.verify_table import show

        show(report, source.folder, target.folder)
    return 0 if report.good else 1


def _verified(args: Namespace) -> tuple[Source, Source, Report]:
    from megatron_ext.upcycle import model
    from megatron_ext.upcycle.source import open_source
    from megatron_ext.upcycle.verify import check_pair, verify

    source, target = open_source(args.source), open_source(args.target)
    check_pair(source, target)
    return source, target, verify(source, target, _batch(args, model.vocab_size(source)))


def as_json(report: Report) -> dict[str, Any]:
    """Return the report in plain values; numbers that JSON has not are strings."""
    return {"good": report.good, **_plain(asdict(report))}


def _batch(args: Namespace, vocab: int) -> Batch:
    """Return B sequences of S tokens: random ones, or the first of a data set.

    Raises:
        UserError: The flags are not numbers of tokens, or the data are too few or of another vocabulary.
    """
    import torch

    from megatron_ext.upcycle.compare import Batch

    for flag, value, least in (("--sequences", args.sequences, 1), ("--seq-length", args.seq_length, 2)):
        if value < least:
            raise UserError("the batch is empty", where=f"{flag} {value}", remedy=f"use {least} or more", exit_code=64)
    count = args.sequences * (args.seq_length + 1)
    if args.data is None:
        tokens = torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(args.seed))
    else:
        tokens = _from_data(args.data, count)
    if int(tokens.max()) >= vocab:
        raise UserError("the data belong to another vocabulary", where=f"token {int(tokens.max())} in {args.data}",
                        why=f"the models know {vocab} tokens", remedy="give data made with the run's tokenizer",
                        exit_code=64)
    words = tokens.reshape(args.sequences, args.seq_length + 1)
    return Batch(words[:, :-1].contiguous(), words[:, 1:].contiguous())


def _from_data(prefix: Path, count: int) -> Any:
    import numpy
    import torch

    from megatron_ext.data.indexed import megatron_indexed

    for end in (".bin", ".idx"):
        if not Path(f"{prefix}{end}").is_file():
            raise UserError("there are no data here", where=f"{prefix}{end}",
                            remedy="give the prefix of a .bin/.idx pair that `megatron-moe tokenize` made",
                            exit_code=64)
    data = megatron_indexed().IndexedDataset(str(prefix))
    parts, have = [], 0
    for number in range(len(data)):
        parts.append(numpy.asarray(data[number]).astype(numpy.int64))
        have += len(parts[-1])
        if have >= count:
            return torch.from_numpy(numpy.concatenate(parts)[:count])
    raise UserError("the data are too few", where=f"{have} tokens in {prefix}.bin", why=f"the batch takes {count}",
                    remedy="pass a smaller --sequences or --seq-length", exit_code=64)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _quiet() -> None:
    # Megatron says at import which optional libraries are absent; none matters here.
    for name in ("megatron", "torch.distributed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
