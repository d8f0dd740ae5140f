"""The files of a patched tree on disk: hashed here, so that neither git's index nor its configuration has a say."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.mpatch.errors import ForeignEdits
from tools.mpatch.patchfile import blob_id
from tools.mpatch.store import Entry, Tree

# Made by running Megatron from the tree, not by editing it: bytecode, the compiled dataset helper, tools' caches.
ARTEFACTS = (
    "__pycache__",
    "*.py[cod]",
    "*.so",
    "*.o",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".DS_Store",
)
# What a compiled helper is made from; a changed source makes the binary stale.
COMPILED_SOURCES = (".cpp", ".cc", ".cu", ".h", ".hpp")


@dataclass(frozen=True)
class Difference:
    """A file on disk that is not as expected: `kind` is changed, added or deleted."""

    path: str
    kind: str


def is_artefact(path: str) -> bool:
    """Return whether an untracked path is a by-product.

    >>> is_artefact("megatron/core/__pycache__/a.cpython-312.pyc"), is_artefact("megatron/core/a.py")
    (True, False)
    """
    return any(fnmatch.fnmatch(part, pattern) for part in path.split("/") for pattern in ARTEFACTS)


def scan(folder: Path, expected: Tree | None = None) -> dict[str, Entry]:
    """Return mode and blob id of every file under `folder`, by-products left out unless `expected` has them."""
    found: dict[str, Entry] = {}
    stack = [""]
    while stack:
        prefix = stack.pop()
        with os.scandir(folder / prefix) as entries:
            for item in entries:
                path = prefix + item.name
                if path == ".git":
                    continue
                if item.is_dir(follow_symlinks=False):
                    stack.append(path + "/")
                elif not is_artefact(path) or (expected is not None and path in expected):
                    found[path] = _entry(item)
    return found


def _entry(item: os.DirEntry[str]) -> Entry:
    if item.is_symlink():
        return Entry("120000", blob_id(os.fsencode(os.readlink(item.path))))
    if not item.is_file(follow_symlinks=False):
        # Reading a pipe or a device would never end.
        raise ForeignEdits(
            "the patched tree holds something that is no file",
            where=item.path,
            why="a pipe, a socket or a device",
            remedy=f"rm {item.path}",
        )
    with open(item.path, "rb") as stream:
        data = stream.read()
        mode = "100755" if os.fstat(stream.fileno()).st_mode & 0o100 else "100644"
    return Entry(mode, blob_id(data))


def differences(folder: Path, expected: Mapping[str, Entry]) -> list[Difference]:
    """Return every file that is not as expected, sorted by path."""
    found = scan(folder, expected)
    kinds = {
        path: "changed" if path in found else "deleted" for path, entry in expected.items() if found.get(path) != entry
    }
    kinds |= {path: "added" for path in found if path not in expected}
    return [Difference(path, kinds[path]) for path in sorted(kinds)]


def contents(folder: Path, changed: list[Difference]) -> dict[str, tuple[str, bytes] | None]:
    """Return mode and content of the differing files; None for deleted ones."""
    found: dict[str, tuple[str, bytes] | None] = {}
    for item in changed:
        path = folder / item.path
        if item.kind == "deleted":
            found[item.path] = None
        elif path.is_symlink():
            found[item.path] = ("120000", os.fsencode(os.readlink(path)))
        else:
            found[item.path] = ("100755" if path.stat().st_mode & 0o100 else "100644", path.read_bytes())
    return found


def carry_compiled(old: Path, new: Path) -> list[str]:
    """Copy compiled helpers into a new tree where the sources beside them are the same; return their paths."""
    carried = []
    for library in sorted(old.rglob("*.so")):
        relative = library.relative_to(old)
        if (new / relative).exists() or not (new / relative.parent).is_dir():
            continue
        if _sources(library.parent) == _sources((new / relative).parent):
            shutil.copy2(library, new / relative)
            carried.append(str(relative))
    return carried


def _sources(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in COMPILED_SOURCES}
