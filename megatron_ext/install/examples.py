"""`megatron-moe examples DIR`: the launch scripts that this installation carries, copied to where they can be run."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from megatron_ext.data.files import write_bytes
from megatron_ext.errors import UserError

_PACKAGED = Path(__file__).resolve().parents[1] / "_examples"
_CHECKOUT = Path(__file__).resolve().parents[2] / "examples"
QUICKSTART = "examples/moe/quickstart.sh"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="gets examples/moe/*; made where it is missing")
    parser.add_argument("--force", action="store_true", help="replace scripts there that differ from these")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(args: argparse.Namespace) -> int:
    """Copy and say how to start; exit 0."""
    written = copy_examples(args.folder, force=args.force)
    if args.json:
        print(json.dumps({"folder": str(args.folder.resolve()), "written": written}, indent=2))
        return 0
    print(f"{len(written)} files written under {args.folder}/examples")
    binaries = shlex.quote(str(Path(sys.executable).parent))
    print(f"next: cd {shlex.quote(str(args.folder))} && PATH={binaries}:$PATH bash {QUICKSTART}")
    return 0


def copy_examples(folder: Path, *, force: bool = False) -> list[str]:
    """Copy the scripts to `folder`/examples; return the paths written, relative to it. Equal files are left alone.

    Raises:
        UserError: a file there is another one and `force` was not given; nothing is written then.
    """
    source = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
    contents = {
        f"examples/{path.relative_to(source)}": path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    todo = {name: data for name, data in contents.items() if not _is(folder / name, data)}
    in_the_way = [name for name in todo if (folder / name).exists()]
    if in_the_way and not force:
        raise UserError(
            f"{len(in_the_way)} of the examples are there already and differ",
            where=str(folder / in_the_way[0]),
            remedy=f"name another folder, or replace them: megatron-moe examples {shlex.quote(str(folder))} --force",
        )
    for name, data in todo.items():
        target = folder / name
        write_bytes(target, data)
        target.chmod(0o755 if data.startswith(b"#!") else 0o644)
    return sorted(todo)


def _is(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data
