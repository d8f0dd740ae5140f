"""Base plus series gives a stack of commits. Every line exactly in its place, every blob compared before and after."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mpatch.errors import ContextMismatch, MpatchError, PostimageMismatch, PreimageMismatch
from tools.mpatch.patchfile import ABSENT, FileChange, Patch, apply_change, blob_id
from tools.mpatch.series import raise_all
from tools.mpatch.store import Store, quoted

BASE_TEXT = "The base, as pinned\n"


@dataclass(frozen=True)
class Step:
    """A patch put on: its commit and the whole tree after it."""

    slug: str
    commit: str
    tree: str


@dataclass(frozen=True)
class Stack:
    """The base and a step for each patch."""

    base_tree: str
    base_commit: str
    steps: tuple[Step, ...]

    @property
    def tree(self) -> str:
        """The tree on top."""
        return self.steps[-1].tree if self.steps else self.base_tree

    @property
    def commit(self) -> str:
        """The commit on top."""
        return self.steps[-1].commit if self.steps else self.base_commit

    def before(self, slug: str) -> str:
        """Return the tree below a patch."""
        at = [step.slug for step in self.steps].index(slug)
        return self.steps[at - 1].tree if at else self.base_tree


Contents = dict[str, tuple[str, bytes] | None]


def build(store: Store, base_tree: str, patches: Sequence[Patch]) -> Stack:
    """Put the patches on the base, in memory, and store the result.

    Raises:
        PreimageMismatch, ContextMismatch, PostimageMismatch: a patch does not fit, exactly.
        SeriesDoesNotApply: several do not; all are listed.
    """
    base = store.tree(base_tree)
    touched = {change.path for patch in patches for change in patch.changes}
    blobs = store.blobs(base[path].blob for path in touched if path in base)
    current: Contents = {path: (base[path].mode, blobs[base[path].blob]) for path in touched if path in base}
    made: list[tuple[Patch, Contents]] = []
    errors: list[MpatchError] = []
    for patch in patches:
        try:
            changed = apply_patch(patch, current)
        except MpatchError as error:
            errors.append(error)
            continue
        current.update(changed)
        made.append((patch, changed))
    raise_all(errors, "patches do not fit")
    return _commit(store, base_tree, made)


def apply_patch(patch: Patch, current: Contents) -> Contents:
    """Return the files that the patch changes, given the current ones (mode and content by path).

    Raises:
        PreimageMismatch, ContextMismatch, PostimageMismatch: see the names.
    """
    name = f"patches/{patch.slug}.patch"
    changed: Contents = {}
    for change in patch.changes:
        entry = current.get(change.path)
        old = entry[1] if entry else b""
        _check_before(change, entry, name)
        new = apply_change(change, old, name)
        got = ABSENT if change.new_id == ABSENT and not new else blob_id(new)
        if got != change.new_id:
            raise PostimageMismatch(
                f"{name} does not give the file that it promises",
                where=change.path,
                why=f"index line says {change.new_id}\nthe hunks give  {got}\n"
                "so the patch was edited by hand after it was made",
                remedy=f"undo the edit: git checkout -- {name}\nor keep it:    mpatch refresh {patch.slug} --from-file",
            )
        changed[change.path] = None if change.new_id == ABSENT else (change.new_mode, new)
    return changed


def _check_before(change: FileChange, entry: tuple[str, bytes] | None, name: str) -> None:
    found = blob_id(entry[1]) if entry else ABSENT
    if found == change.old_id and (entry is None or entry[0] == change.old_mode):
        return
    if entry is not None and found != change.old_id:
        try:
            apply_change(change, entry[1], name)
        except ContextMismatch as error:
            raise error from None  # says which line, which is more than two ids do
    if entry is not None and blob_id(entry[1]) == change.new_id:
        why = "the file already is what the patch makes of it: absorbed upstream?"
    else:
        why = "the file is not there" if entry is None else f"expected {change.old_id}\nfound    {found}"
    raise PreimageMismatch(
        f"{name} was made for another version of this file",
        where=change.path,
        why=why,
        remedy="mpatch drift shows how each patch fares; mpatch rebase moves them",
    )


def _commit(store: Store, base_tree: str, made: list[tuple[Patch, Contents]]) -> Stack:
    """Store all commits with one process."""
    base_commit = store.commit(base_tree, BASE_TEXT, None)
    if not made:
        return Stack(base_tree, base_commit, ())
    stream: list[bytes] = []
    for number, (patch, changed) in enumerate(made, 1):
        said = patch.message
        text = said.text().encode()
        stream.append(
            b"commit refs/mpatch/series\nmark :%d\nauthor %s <%s> %s\n"
            % (number, said.author.encode(), said.email.encode(), said.date.encode())
        )
        stream.append(b"committer mpatch <mpatch@localhost> Thu, 1 Jan 1970 00:00:00 +0000\ndata %d\n" % len(text))
        stream.append(text + b"from %s\n" % (base_commit.encode() if number == 1 else b":%d" % (number - 1)))
        for path, entry in changed.items():
            if entry is None:
                stream.append(b"D %s\n" % quoted(path))
            else:
                stream.append(
                    b"M %s inline %s\ndata %d\n%s\n" % (entry[0].encode(), quoted(path), len(entry[1]), entry[1])
                )
    with tempfile.TemporaryDirectory(dir=store.repo.git_dir) as folder:
        marks = Path(folder) / "marks"
        store.repo.run(
            "fast-import",
            "--quiet",
            "--force",
            "--date-format=rfc2822",
            f"--export-marks={marks}",
            stdin=b"".join(stream),
        )
        by_mark = dict(line.split(" ") for line in marks.read_text().splitlines())
    commits = [by_mark[f":{number}"] for number in range(1, len(made) + 1)]
    trees = store.repo.run("rev-parse", *(f"{commit}^{{tree}}" for commit in commits)).text().split("\n")
    steps = [Step(patch.slug, commit, tree) for (patch, _), commit, tree in zip(made, commits, trees, strict=True)]
    return Stack(base_tree, base_commit, tuple(steps))
