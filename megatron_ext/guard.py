"""The guard at import time: every `megatron.*` module of this process must be a file of the patched tree.

`megatron` is a namespace package, so a mix of a checkout and an installed megatron-core imports without a word and
fails much later, or trains something else than was asked for. `mpatch apply` records git's blob id of each file; the
guard compares the imported ones. Standard library only; hashing 200 files takes some 20 ms.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from megatron_ext.errors import UserError

_PACKAGED = Path(__file__).with_name("_files.json")
_CHECKOUT = Path(__file__).resolve().parent.parent / "build" / "files.json"
# `mpatch prove` runs tests against another tree on purpose; then only mixing is an error.
TREE_VARIABLE = "MPATCH_TREE"


@dataclass(frozen=True)
class Record:
    """What the patched tree holds: its folder, git's blob id by path (empty: any content will do), its tree id."""

    root: Path
    files: Mapping[str, str]
    tree: str = ""
    # In an installed wheel `mpatch` is no remedy; reinstalling is.
    installed: bool = False

    def packages(self) -> set[str]:
        """Return the names right below `megatron` that are ours; others may share the namespace (megatron.energon)."""
        if self.files:
            return {path.split("/")[1].removesuffix(".py") for path in self.files if path.startswith("megatron/")}
        return {path.stem for path in (self.root / "megatron").glob("*")}


def load_record() -> Record:
    """Return what `mpatch apply` recorded, or what the wheel carries.

    Raises:
        UserError: nothing was recorded.
    """
    other = os.environ.get(TREE_VARIABLE)
    if other:
        return Record(Path(other).resolve(), {})
    for path, root, installed in (
        (_PACKAGED, _PACKAGED.parent.parent, True),
        (_CHECKOUT, _CHECKOUT.parent / "megatron", False),
    ):
        if path.is_file():
            told = json.loads(path.read_text())
            return Record(root, told["files"], told["patched_tree"], installed)
    raise UserError("the patched Megatron was not built", where=str(_CHECKOUT), remedy="run `make setup`")


def check_imported(modules: Mapping[str, ModuleType] | None = None, record: Record | None = None) -> int:
    """Check every `megatron.*` module that is imported so far; return how many were looked at.

    Raises:
        UserError: a module comes from another folder, or its file is not the patched one. Both paths are named.
    """
    record = record or load_record()
    checked, ours = 0, record.packages()
    for name, module in sorted((sys.modules if modules is None else modules).items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] != "megatron" or not file or not file.endswith(".py"):
            continue
        if "." in name and name.split(".")[1] not in ours:
            continue
        _check_one(name, Path(file), record)
        checked += 1
    return checked


def _check_one(name: str, file: Path, record: Record) -> None:
    real = file.resolve()
    inside = real.is_relative_to(record.root.resolve())
    relative = "/".join(name.split("."))
    expected = next((record.root / path for path in (f"{relative}.py", f"{relative}/__init__.py")
                     if (record.root / path).is_file()), record.root / relative)  # fmt: skip
    if not inside:
        raise UserError(
            f"{name} is not the patched one",
            where=f"imported from {file}\npatched is    {expected}".replace("\n", "\n       "),
            why="another megatron-core comes first on the path, or the two are mixed",
            remedy="uninstall megatron-core from this environment, or put the patched tree first: mpatch doctor",
        )
    path = str(real.relative_to(record.root.resolve()))
    wanted = record.files.get(path)
    if record.files and wanted != blob_id(real.read_bytes()):
        if record.installed:
            raise UserError(
                f"{name} is not the file that the wheel brought",
                where=str(file),
                why="it was edited, or a megatron-core installed beside megatron-moe has written over it (both bring "
                "`megatron`)",
                remedy="pip uninstall megatron-core, then pip install --force-reinstall --no-deps the megatron-moe "
                "wheel; megatron-moe doctor says what differs",
            )
        raise UserError(
            f"{name} was changed after it was patched",
            where=f"{file} (recorded in {record.root}: {wanted or 'no such file'})",
            why="its content is not the one that `mpatch apply` recorded",
            remedy="mpatch status lists the edits; mpatch refresh SLUG keeps them, mpatch apply --discard drops them; "
            f"to try them as they are: {TREE_VARIABLE}={record.root}",
        )


def blob_id(data: bytes) -> str:
    """Return git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
