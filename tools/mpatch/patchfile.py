"""A patch: what it is, how it is applied exactly, and the one canonical form that it is written in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tools.mpatch import message as mail
from tools.mpatch.errors import ContextMismatch
from tools.mpatch.message import Message

ABSENT = "0" * 40
FILE_MODES = ("100644", "100755")
NO_NEWLINE = b"\\ No newline at end of file\n"


@dataclass(frozen=True)
class Hunk:
    """One hunk. `lines` start with blank, plus or minus and end with their line end; `place` is the dotted def path."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    place: str
    lines: tuple[bytes, ...]

    def old(self) -> list[bytes]:
        """Return the lines that must be there before."""
        return [line[1:] for line in self.lines if line[:1] in b" -"]

    def new(self) -> list[bytes]:
        """Return the lines that are there afterwards."""
        return [line[1:] for line in self.lines if line[:1] in b" +"]

    def added(self) -> int:
        """Return the number of added lines."""
        return sum(line[:1] == b"+" for line in self.lines)

    def removed(self) -> int:
        """Return the number of removed lines."""
        return sum(line[:1] == b"-" for line in self.lines)


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file: full blob ids before and after (forty zeros when absent), modes, hunks."""

    path: str
    old_id: str
    new_id: str
    old_mode: str
    new_mode: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    """A whole patch file."""

    slug: str
    message: Message
    changes: tuple[FileChange, ...]

    def added(self) -> int:
        """Return the number of added lines."""
        return sum(hunk.added() for change in self.changes for hunk in change.hunks)

    def removed(self) -> int:
        """Return the number of removed lines."""
        return sum(hunk.removed() for change in self.changes for hunk in change.hunks)

    def hunks(self) -> int:
        """Return the number of hunks."""
        return sum(len(change.hunks) for change in self.changes)


def blob_id(data: bytes) -> str:
    """Return git's id of a file's content.

    >>> blob_id(b"")
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def split(data: bytes) -> list[bytes]:
    r"""Split at newlines only, keeping them.

    >>> split(b"a\rb\nc")
    [b'a\rb\n', b'c']
    """
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def apply_change(change: FileChange, old: bytes, name: str) -> bytes:
    """Return the file after the change; every line must be exactly where the hunk says.

    Raises:
        ContextMismatch: with file, line and def path, expected and found.
    """
    lines = split(old)
    out: list[bytes] = []
    at = 0
    for hunk in change.hunks:
        # A hunk without old lines names the line it follows, others the line they start at.
        start = hunk.old_start if hunk.old_count == 0 else hunk.old_start - 1
        wanted = hunk.old()
        if start < at or lines[start : start + len(wanted)] != wanted:
            raise mismatch(change, hunk, lines, start, name)
        out += lines[at:start]
        out += hunk.new()
        at = start + len(wanted)
    return b"".join(out + lines[at:])


def mismatch(change: FileChange, hunk: Hunk, lines: list[bytes], start: int, name: str) -> ContextMismatch:
    """Return the error for a hunk whose old lines are not at `start`."""
    number, expected, found = start, b"", b""
    for offset, wanted in enumerate(hunk.old()):
        at = start + offset
        if at >= len(lines) or lines[at] != wanted:
            number, expected = at, wanted
            found = lines[at] if at < len(lines) else b"<end of file>"
            break
    where = f"{change.path}:{number + 1}" + (f" in {hunk.place}" if hunk.place else "")
    return ContextMismatch(
        f"{name} does not fit",
        where=where,
        why=f"expected {expected.decode(errors='replace').rstrip()!r}\n"
        f"found    {found.decode(errors='replace').rstrip()!r}",
        remedy="mpatch drift shows how each patch fares; mpatch rebase moves them",
    )


def render(patch: Patch) -> bytes:
    """Return the canonical bytes of a patch; `parse` gives the same patch back."""
    return mail.render(patch.message) + b"".join(map(render_change, patch.changes))


def render_change(change: FileChange) -> bytes:
    """Return one file's part, as `git diff --full-index` writes it."""
    path = change.path.encode()
    out = [b"diff --git a/%s b/%s\n" % (path, path)]
    if change.old_id == ABSENT:
        out.append(b"new file mode %s\n" % change.new_mode.encode())
    elif change.new_id == ABSENT:
        out.append(b"deleted file mode %s\n" % change.old_mode.encode())
    elif change.old_mode != change.new_mode:
        out.append(b"old mode %s\nnew mode %s\n" % (change.old_mode.encode(), change.new_mode.encode()))
    if change.old_id != change.new_id:
        same = b" " + change.new_mode.encode() if change.old_mode == change.new_mode else b""
        out.append(b"index %s..%s%s\n" % (change.old_id.encode(), change.new_id.encode(), same))
    if change.hunks:
        tail = b"\t" if " " in change.path else b""  # as GNU diff: a blank in a name is followed by a tab
        out.append(b"--- /dev/null\n" if change.old_id == ABSENT else b"--- a/%s%s\n" % (path, tail))
        out.append(b"+++ /dev/null\n" if change.new_id == ABSENT else b"+++ b/%s%s\n" % (path, tail))
    for hunk in change.hunks:
        out.append(b"@@ -%s +%s @@" % (_range(hunk.old_start, hunk.old_count), _range(hunk.new_start, hunk.new_count)))
        out.append((b" " + hunk.place.encode() if hunk.place else b"") + b"\n")
        for line in hunk.lines:
            out.append(line if line.endswith(b"\n") else line + b"\n" + NO_NEWLINE)
    return b"".join(out)


def _range(start: int, count: int) -> bytes:
    return b"%d" % start if count == 1 else b"%d,%d" % (start, count)
