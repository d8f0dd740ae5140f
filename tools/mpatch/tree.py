"""Lay a patched tree out: in a scratch folder, checked by blobs, then swapped into its place."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from tools.mpatch.errors import ForeignEdits, VerifyFailed
from tools.mpatch.files import scratch_folder, swap, write_bytes
from tools.mpatch.git import Repo, run_git
from tools.mpatch.state import State, dump, state_path
from tools.mpatch.store import Store
from tools.mpatch.worktree import ARTEFACTS, Difference, carry_compiled, contents, differences

# Attributes of the base (a .gitattributes with eol or filter rules) must not change bytes on the way to disk.
NO_ATTRIBUTES = "* -text -filter -ident -working-tree-encoding -eol\n"
SHOWN_FILES = 20


def lay_out(store: Store, place: Path, commit: str, tree: str, state: State) -> None:
    """Make `place` hold exactly `tree`, with its own git whose HEAD is `commit`.

    Raises:
        VerifyFailed: the files on disk are not the tree's; the place is untouched then.
    """
    scratch = scratch_folder(place)
    try:
        write_tree(store, scratch, commit, tree)
        write_bytes(state_path(scratch), dump(state).encode())
        if place.exists():
            carry_compiled(place, scratch)
        swap(scratch, place)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(scratch)


def write_tree(store: Store, folder: Path, commit: str, tree: str) -> None:
    """Write a tree and its git into an empty folder, and compare every blob afterwards.

    Raises:
        VerifyFailed: what is on disk differs from the tree, whatever git said.
    """
    run_git("init", "-q", "--template=", str(folder), cwd=folder)
    git_dir = folder / ".git"
    (git_dir / "info").mkdir(exist_ok=True)
    (git_dir / "info" / "attributes").write_text(NO_ATTRIBUTES)
    (git_dir / "info" / "exclude").write_text("\n".join(ARTEFACTS) + "\n")
    # Relative, so that a checkout can be moved; both stay under build/.
    objects = os.path.relpath(store.repo.git_dir / "objects", git_dir / "objects")
    (git_dir / "objects" / "info").mkdir(exist_ok=True)
    # A store may borrow from a clone that is only looked at (drift).
    borrowed = [objects, *(str(path) for path in store.repo.alternates)]
    (git_dir / "objects" / "info" / "alternates").write_text("\n".join(borrowed) + "\n")
    repo = Repo(git_dir, folder)
    repo.run("update-ref", "HEAD", commit)
    # The commit may stand for another tree (an open conflict): HEAD is what the changes are shown against.
    repo.run("read-tree", "-u", "--reset", tree)
    if tree != repo.run("rev-parse", "HEAD^{tree}").text():
        repo.run("read-tree", "HEAD")
    wrong = differences(folder, store.tree(tree))
    if wrong:
        raise VerifyFailed(
            "the files on disk are not what was asked for",
            where=str(folder),
            why=listed(wrong),
            remedy="is the disk full, or the file system case-insensitive?",
        )


def listed(items: list[Difference]) -> str:
    """Return the differing files, one a line, shortened when there are many."""
    lines = [f"{item.kind:<8} {item.path}" for item in items[:SHOWN_FILES]]
    if len(items) > SHOWN_FILES:
        lines.append(f"... and {len(items) - SHOWN_FILES} more")
    return "\n".join(lines)


def foreign(items: list[Difference], where: str) -> ForeignEdits:
    """Return the refusal that lists edits which no patch has."""
    return ForeignEdits(
        "the patched tree has changes that no patch has",
        where=where,
        why=listed(items),
        remedy="into a patch: mpatch refresh SLUG, or: mpatch new TOPIC/SLUG && mpatch refresh\n"
        "save:         mpatch apply --save build/edits.diff\n"
        "discard:      mpatch apply --discard",
    )


def worktree_tree(store: Store, place: Path, expected: str) -> tuple[str, list[Difference]]:
    """Store what is on disk; return its tree id and how it differs from the tree `expected`."""
    changed = differences(place, store.tree(expected))
    if not changed:
        return expected, []
    return store.change_tree(expected, contents(place, changed)), changed
