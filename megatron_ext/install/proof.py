"""Proof by hash that what is installed is what was built: Megatron's files, and every file of the wheel."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.guard import Record, blob_id

DISTRIBUTION = "megatron-moe"
UPSTREAM = "megatron-core"
# Made by running, not by installing.
_BYPRODUCTS = (".pyc", ".pyo")


@dataclass(frozen=True)
class Proof:
    """What a comparison by hash found.

    Args:
        checked: How many files were compared.
        changed: Files whose content is another one, sorted.
        missing: Files that are recorded and not there.
        foreign: Files that stand between ours and are not recorded.
    """

    checked: int
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether something was compared and all of it is as recorded."""
        return self.checked > 0 and not (self.changed or self.missing or self.foreign)

    def describe(self) -> str:
        """Return one line: how many files, and the first of each kind that differs."""
        if self.good:
            return f"{self.checked} files, all as recorded"
        parts = [
            f"{len(paths)} {kind}, e.g. {paths[0]}"
            for kind, paths in (("changed", self.changed), ("missing", self.missing), ("foreign", self.foreign))
            if paths
        ]
        return f"{self.checked} files compared; {'; '.join(parts)}" if parts else "nothing is recorded"


def prove_megatron(record: Record) -> Proof:
    """Compare every file below `megatron/` with git's blob id from the verified tree.

    Foreign are files inside the packages that the tree has (megatron/core, megatron/training); other packages may share
    the `megatron` namespace.
    """
    wanted = {path: blob for path, blob in record.files.items() if path.startswith("megatron/")}
    changed = [path for path in wanted if (record.root / path).is_file() and _blob(record.root / path) != wanted[path]]
    missing = [path for path in wanted if not (record.root / path).is_file()]
    tops = sorted({"/".join(path.split("/")[:2]) for path in wanted})
    foreign = [path for top in tops for path in _files(record.root, top) if path not in wanted]
    return Proof(len(wanted), tuple(sorted(changed)), tuple(sorted(missing)), tuple(sorted(foreign)))


def prove_distribution(name: str = DISTRIBUTION) -> Proof | None:
    """Compare every installed file of a wheel with the sha256 in its RECORD; None where there is no such wheel.

    An editable install has a RECORD of a few lines that says nothing about the files in use, and counts as none.
    """
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = [file for file in found.files or [] if file.hash is not None and file.suffix not in _BYPRODUCTS]
    if not any(str(file).startswith("megatron_ext/") for file in files):
        return None
    changed, missing = [], []
    for file in files:
        path = Path(str(found.locate_file(file)))
        if not path.is_file():
            missing.append(str(file))
        elif file.hash is not None and _recorded_form(path, file.hash.mode) != file.hash.value:
            changed.append(str(file))
    return Proof(len(files), tuple(sorted(changed)), tuple(sorted(missing)))


def other_megatron(record: Record) -> str:
    """Return "megatron-core VERSION in FOLDER" where an upstream package is installed beside ours, else nothing.

    It has the same import names, so its files lie over ours or ours over its.
    """
    for found in importlib.metadata.distributions(name=UPSTREAM):
        folder = Path(str(found.locate_file(""))).resolve()
        # The patched tree of a checkout carries upstream's own metadata; in a wheel only an installed one is there.
        if folder != record.root.resolve() or not _is_checkout(record):
            return f"{UPSTREAM} {found.version} in {folder}"
    return ""


def _is_checkout(record: Record) -> bool:
    return (record.root / ".git").exists()


def _files(root: Path, top: str) -> Iterator[str]:
    for path in (root / top).rglob("*"):
        # A checkout's helper is compiled beside its source; in a wheel it is recorded.
        if path.is_file() and path.suffix not in (*_BYPRODUCTS, ".so"):
            yield str(path.relative_to(root))


def _blob(path: Path) -> str:
    return blob_id(path.read_bytes())


def _recorded_form(path: Path, mode: str) -> str:
    digest = hashlib.new(mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
