"""The series and the pins as they are now, in another folder, or at a revision of this checkout's own repository."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import GitFailed, MpatchError, SnapshotUnreadable
from tools.mpatch.files import write_bytes
from tools.mpatch.git import run_git
from tools.mpatch.pins import Pins
from tools.mpatch.series import Series, load_series

HELD = ("upstream.toml", "patches")
# A release's tag is `v` and its version.
TAGS = "v*+moe.*"


@dataclass(frozen=True)
class Snapshot:
    """Pins and series of one moment; `name` is what the reader is told."""

    name: str
    pins: Pins
    series: Series

    @property
    def version(self) -> str:
        """The version on the default base."""
        return self.pins.version()

    @property
    def digest(self) -> str:
        """The series digest; empty where the default base has no tree id yet."""
        tree = self.pins.base().tree
        return self.series.digest(tree) if tree else ""


def snapshot(checkout: Checkout, where: str = "") -> Snapshot:
    """Read a state: the checkout's files (empty), a folder with upstream.toml and patches/, or a revision.

    Raises:
        SnapshotUnreadable: there is no such folder or revision, or what it holds cannot be read.
    """
    if not where:
        return Snapshot("the checkout", checkout.pins(), load_series(checkout))
    if (Path(where) / "upstream.toml").is_file():
        other = Checkout(Path(where).resolve())
        return Snapshot(where, other.pins(), load_series(other))
    with tempfile.TemporaryDirectory(prefix="mpatch-") as name:
        other = Checkout(Path(name))
        for path, data in _files(checkout, where).items():
            write_bytes(other.root / path, data)
        try:
            return Snapshot(where, other.pins(), load_series(other))
        except MpatchError as error:
            raise SnapshotUnreadable(
                f"{where} holds no series that this mpatch reads",
                where=error.where.replace(name, where),
                why=error.what,
                remedy="name a revision since the series began, or a folder",
            ) from None


def last_release(checkout: Checkout, before: str = "") -> str:
    """Return the newest release tag that `before` (default: HEAD) descends from, other than its own; empty for none."""
    found = run_git("tag", "--list", TAGS, "--merged", before or "HEAD", "--sort=-creatordate", "--sort=-v:refname",
                    cwd=checkout.root, ok=(0, 128, 129)).text().split()  # fmt: skip
    return next((tag for tag in found if tag != before), "")


def _files(checkout: Checkout, revision: str) -> dict[str, bytes]:
    try:
        listing = run_git("ls-tree", "-r", "-z", "--full-tree", revision, "--", *HELD, cwd=checkout.root)
        rows = [row.partition(b"\t") for row in listing.out.split(b"\0")[:-1]]
        blobs = {path.decode(): head.split()[2].decode() for head, _, path in rows}
        return {path: run_git("cat-file", "blob", blob, cwd=checkout.root).out for path, blob in blobs.items()}
    except GitFailed as error:
        raise SnapshotUnreadable(
            f"no folder and no revision {revision!r}",
            where=str(checkout.root),
            why=error.why,
            remedy="git tag --list, or name a folder that holds upstream.toml and patches/",
        ) from None
