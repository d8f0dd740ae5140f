"""From two versions of a file to hunks with the least context that still has one place only.

git finds which lines differ (`git diff -U0`, isolated); the context is ours, because git has one width for all hunks.
One line of context survives upstream's moves best and quotes least, but where it fits twice in the file it is widened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tools.mpatch.errors import PatchKindRefused
from tools.mpatch.patchfile import ABSENT, FILE_MODES, FileChange, Hunk, split
from tools.mpatch.place import place_of, spans
from tools.mpatch.store import Entry, Store

RANGES = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
FIRST_CONTEXT = 1


@dataclass(frozen=True)
class Edit:
    """Old lines [old_at, old_end) become new lines [new_at, new_end); counted from 0."""

    old_at: int
    old_end: int
    new_at: int
    new_end: int


def changes_between(store: Store, old_tree: str, new_tree: str) -> tuple[FileChange, ...]:
    """Return what turns one tree into the other, files in git's order.

    Raises:
        PatchKindRefused: symlinks, submodules, binaries, changes of mode alone.
    """
    return tuple(file_change(store, path, old, new) for path, old, new in store.diff(old_tree, new_tree))


def file_change(store: Store, path: str, old: Entry | None, new: Entry | None) -> FileChange:
    """Return the canonical change of one file."""
    if not path.isprintable():
        raise PatchKindRefused(
            "this name is not carried",
            where=ascii(path),
            why="it has a control character, or is not UTF-8",
            remedy="rename the file",
        )
    for entry in (old, new):
        if entry and entry.mode not in FILE_MODES:
            raise PatchKindRefused(
                "only plain files are carried",
                where=path,
                why=f"mode {entry.mode}",
                remedy=f"remove {path} from the change",
            )
    if old and new and old.blob == new.blob:
        raise PatchKindRefused(
            "a change of mode alone is not carried",
            where=path,
            why=f"{old.mode} to {new.mode}",
            remedy=f"chmod {path} back",
        )
    before = store.blob(old.blob) if old else b""
    after = store.blob(new.blob) if new else b""
    if b"\0" in before or b"\0" in after:
        raise PatchKindRefused("a binary is not carried", where=path, remedy=f"remove {path} from the change")
    return FileChange(
        path,
        old.blob if old else ABSENT,
        new.blob if new else ABSENT,
        old.mode if old else "",
        new.mode if new else "",
        hunks_between(store, path, before, after),
    )


def hunks_between(store: Store, path: str, before: bytes, after: bytes) -> tuple[Hunk, ...]:
    """Return the hunks that turn `before` into `after`."""
    edits = [_edit(match) for match in RANGES.finditer(store.diff_blobs(before, after))]
    old, new = split(before), split(after)
    return tuple(_hunk(path, group, context, old, new, after) for group, context in _grouped(edits, old))


def _edit(match: re.Match[bytes]) -> Edit:
    old_start, new_start = int(match[1]), int(match[3])
    old_count = 1 if match[2] is None else int(match[2])
    new_count = 1 if match[4] is None else int(match[4])
    old_at = old_start if old_count == 0 else old_start - 1
    new_at = new_start if new_count == 0 else new_start - 1
    return Edit(old_at, old_at + old_count, new_at, new_at + new_count)


def _grouped(edits: list[Edit], old: list[bytes]) -> list[tuple[list[Edit], int]]:
    """Join edits whose contexts touch, and widen each group until its old lines fit in one place only."""
    groups = [([edit], FIRST_CONTEXT) for edit in edits]
    while True:
        joined: list[tuple[list[Edit], int]] = []
        for group, context in groups:
            if joined and group[0].old_at - context <= joined[-1][0][-1].old_end + joined[-1][1]:
                before, wider = joined.pop()
                joined.append((before + group, max(wider, context)))
            else:
                joined.append((group, context))
        groups = [(group, _widened(group, context, old)) for group, context in joined]
        if groups == joined:
            return groups


def _widened(group: list[Edit], context: int, old: list[bytes]) -> int:
    while True:
        first, last = max(group[0].old_at - context, 0), min(group[-1].old_end + context, len(old))
        if occurrences(old, old[first:last]) <= 1 or (first == 0 and last == len(old)):
            return context
        context += 1


def occurrences(lines: list[bytes], wanted: list[bytes]) -> int:
    r"""Return in how many places of `lines` the lines `wanted` stand.

    >>> occurrences([b"a\n", b"b\n", b"a\n", b"b\n"], [b"a\n", b"b\n"])
    2
    """
    if not wanted:
        return len(lines) + 1
    return sum(
        lines[at : at + len(wanted)] == wanted for at in range(len(lines) - len(wanted) + 1) if lines[at] == wanted[0]
    )


def _hunk(path: str, group: list[Edit], context: int, old: list[bytes], new: list[bytes], after: bytes) -> Hunk:
    first, last = max(group[0].old_at - context, 0), min(group[-1].old_end + context, len(old))
    new_first = group[0].new_at - (group[0].old_at - first)
    lines: list[bytes] = []
    at = first
    for edit in group:
        lines += [b" " + line for line in old[at : edit.old_at]]
        lines += [b"-" + line for line in old[edit.old_at : edit.old_end]]
        lines += [b"+" + line for line in new[edit.new_at : edit.new_end]]
        at = edit.old_end
    lines += [b" " + line for line in old[at:last]]
    old_count = last - first
    new_count = sum(line[:1] != b"-" for line in lines)
    return Hunk(
        first + 1 if old_count else first,
        old_count,
        new_first + 1 if new_count else new_first,
        new_count,
        place_of_lines(path, after, new_first + 1, lines),
        tuple(lines),
    )


def place_of_lines(path: str, after: bytes, start: int, lines: list[bytes] | tuple[bytes, ...]) -> str:
    """Return the def path of a hunk's first changed line, looked up in the file after the change.

    Args:
        path: Only `.py` files have places.
        after: The file after the change.
        start: The new line number (from 1) of the hunk's first line.
        lines: The hunk's lines with their signs.
    """
    number = start
    for line in lines:
        if line[:1] != b" ":
            break
        number += 1
    return place_of(path, after, number, spans(after) if path.endswith(".py") else [])
