"""The end of a verb that makes a checkpoint: refuse what cannot be written, say what will be, write it, answer."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.upcycle import explain, target
from megatron_ext.upcycle.target import Content


def write(args: Namespace, content: Content, *, folder: str, tracker: str, note: Mapping[str, Any],
          tell: Callable[[], None]) -> int:
    """Write a checkpoint as the command's words ask for; return 0.

    Args:
        args: `source`, `target`, `dry_run` and `json` of the command.
        content: What to write.
        folder: Its folder's name in the target.
        tracker: What the tracker file says.
        note: The result for programs; where it was written is added to it.
        tell: Prints what will be done, for people.

    Raises:
        UserError: The target is the source, holds a checkpoint, or is too small.
    """
    if args.source.resolve() == args.target.resolve():
        raise UserError("source and target are the same folder", where=str(args.target), remedy="give a new folder")
    target.check_target(args.target, num_bytes=content.num_bytes)
    if not args.json:
        tell()
    written: dict[str, str] = {}
    if not args.dry_run:
        display, advance = explain.progress_bar(content, quiet=args.json)
        with display:
            made = target.write_checkpoint(args.target, folder, tracker, content, progress=advance)
        written = {"written": str(made)}
    if args.json:
        print(json.dumps({**note, **written}))
    elif written:
        print(f"written: {written['written']}")
    return 0
