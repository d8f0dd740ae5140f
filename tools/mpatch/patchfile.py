"""A patch file: read strictly, applied exactly, written in one canonical form.

The reader is our own because every byte counts here (unidiff, the usual library, reads text and forgives); the tests
compare it with unidiff and with git.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from tools.mpatch import message as mail
from tools.mpatch.errors import (
    ContextMismatch,
    PatchContextStripped,
    PatchHasCRLF,
    PatchKindRefused,
    PatchMalformed,
    PathEscapes,
)
from tools.mpatch.message import Message

ABSENT = "0" * 40
HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: (.*))?$")
INDEX = re.compile(rb"^index ([0-9a-f]+)\.\.([0-9a-f]+)(?: ([0-7]{6}))?$")
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


def check_path(path: str, name: str) -> str:
    """Return the path when it stays inside the tree.

    Raises:
        PathEscapes: absolute, `..`, empty parts, `.git`, a backslash or a control character.
    """
    parts = path.split("/")
    bad = [part for part in parts if part in ("", ".", "..") or part.lower().rstrip(". ") == ".git"]
    if bad or "\\" in path or path.startswith("~") or any(ord(char) < 32 for char in path):
        raise PathEscapes(
            "the patch names a path outside the tree",
            where=name,
            why=repr(path),
            remedy="do not apply this file; ask whoever sent it",
        )
    return path


def parse(slug: str, data: bytes, name: str = "") -> Patch:
    """Read a patch file.

    Raises:
        PatchHasCRLF: line ends were converted by a checkout.
        PatchMalformed: anything else that is not the canonical form; subclasses name the cause.
    """
    name = name or f"patches/{slug}.patch"
    if b"\r\n" in data[: data.find(b"\n") + 1]:
        raise PatchHasCRLF(
            "the patch has CRLF line ends",
            where=f"{name}:1",
            why="a checkout converted it; a patch is bytes",
            remedy="put `*.patch -text` into .gitattributes, then: git rm --cached -q patches -r && "
            "git reset -q --hard",
        )
    start = data.find(b"\ndiff --git ")
    if start < 0:
        raise PatchMalformed(
            "the file holds no diff",
            where=name,
            why="no line starts with `diff --git `",
            remedy="a patch that changes nothing is an error; mpatch drop it, or re-export it",
        )
    said = mail.parse(data[: start + 1], name)
    reader = _Reader(name, data[start + 1 :].split(b"\n"), data[: start + 1].count(b"\n"))
    if data[-1:] != b"\n":
        raise PatchMalformed("the file ends in the middle of a line", where=name, remedy="re-export it: mpatch refresh")
    changes = tuple(reader.changes())
    paths = [change.path for change in changes]
    if len(set(paths)) != len(paths):
        raise PatchMalformed("a file is named twice", where=name, remedy="re-export it: mpatch refresh")
    return Patch(slug, said, changes)


class _Reader:
    """Walks the lines of the diff part; `at` is the line it looks at."""

    def __init__(self, name: str, lines: list[bytes], offset: int) -> None:
        self.name, self.lines, self.offset, self.at = name, lines[:-1], offset, 0

    def where(self) -> str:
        return f"{self.name}:{self.offset + self.at + 1}"

    def line(self) -> bytes:
        return self.lines[self.at] if self.at < len(self.lines) else b""

    def take(self, prefix: bytes) -> bytes:
        """Return the rest of the line that must start with `prefix`, and go on."""
        line = self.line()
        if not line.startswith(prefix):
            raise PatchMalformed(
                "unexpected line",
                where=self.where(),
                why=f"expected {prefix.decode()!r}, found {line[:80].decode(errors='replace')!r}",
                remedy="re-export it: mpatch refresh",
            )
        self.at += 1
        return line[len(prefix) :]

    def changes(self) -> list[FileChange]:
        found = []
        while self.at < len(self.lines):
            found.append(self.change())
        return found

    def change(self) -> FileChange:
        names = self.take(b"diff --git a/").decode("utf-8", "replace")
        path = names[: (len(names) - 3) // 2]
        check_path(path, self.where())
        if names != f"{path} b/{path}":
            raise PatchKindRefused(
                "a rename, or a quoted path",
                where=self.where(),
                why=names,
                remedy="carry a removal and a new file instead: mpatch refresh does",
            )
        old_mode, new_mode = self.modes()
        ids = INDEX.match(self.line())
        if ids is None:
            self.refuse_kind()
        assert ids is not None
        old_id, new_id, same_mode = ids[1].decode(), ids[2].decode(), (ids[3] or b"").decode()
        if len(old_id) != 40 or len(new_id) != 40:
            raise PatchMalformed(
                "short blob ids",
                where=self.where(),
                why=self.line().decode(),
                remedy="the ids are the patch's checksum; re-export it: mpatch refresh",
            )
        self.at += 1
        old_mode, new_mode = old_mode or same_mode, new_mode or same_mode
        for mode in {old_mode, new_mode} - {"", "000000"}:
            if mode not in FILE_MODES:
                raise PatchKindRefused(
                    "only plain files are carried",
                    where=self.where(),
                    why=f"mode {mode}",
                    remedy="120000 is a symlink, 160000 a submodule; leave them out",
                )
        if self.line().startswith((b"Binary files", b"GIT binary patch")):
            self.refuse_kind()
        hunks: tuple[Hunk, ...] = ()
        if self.line().startswith(b"--- "):
            hunks = self.body(path, old_id, new_id)
        return FileChange(
            path,
            old_id,
            new_id,
            "" if old_id == ABSENT else old_mode,
            "" if new_id == ABSENT else new_mode,
            hunks,
        )

    def modes(self) -> tuple[str, str]:
        if self.line().startswith(b"new file mode "):
            return "", self.take(b"new file mode ").decode()
        if self.line().startswith(b"deleted file mode "):
            return self.take(b"deleted file mode ").decode(), ""
        if self.line().startswith(b"old mode "):
            return self.take(b"old mode ").decode(), self.take(b"new mode ").decode()
        return "", ""

    def refuse_kind(self) -> None:
        line = self.line().decode(errors="replace")
        if line.startswith(("Binary", "GIT binary", "rename", "copy", "similarity")):
            raise PatchKindRefused(
                "a binary, a rename or a copy",
                where=self.where(),
                why=line,
                remedy="the queue carries text changes of plain files only",
            )
        raise PatchMalformed(
            "no index line with full blob ids",
            where=self.where(),
            why=repr(line[:80]),
            remedy="re-export it: mpatch refresh",
        )

    def body(self, path: str, old_id: str, new_id: str) -> tuple[Hunk, ...]:
        for prefix, side, file_id in ((b"--- ", "a", old_id), (b"+++ ", "b", new_id)):
            named = self.take(prefix).decode("utf-8", "replace").rstrip("\t")
            wanted = "/dev/null" if file_id == ABSENT else f"{side}/{path}"
            if named != wanted:
                self.at -= 1
                check_path(named.removeprefix(f"{side}/"), self.where())
                raise PatchMalformed(
                    "the file names disagree",
                    where=self.where(),
                    why=f"{named}, expected {wanted}",
                    remedy="re-export it: mpatch refresh",
                )
        hunks = []
        while self.line().startswith(b"@@"):
            hunks.append(self.hunk())
        if not hunks:
            raise PatchMalformed("no hunk", where=self.where(), remedy="re-export it: mpatch refresh")
        return tuple(hunks)

    def hunk(self) -> Hunk:
        match = HUNK.match(self.line())
        if match is None:
            self.take(b"@@ -N,N +N,N @@")
        assert match is not None
        self.at += 1
        old_start, new_start = int(match[1]), int(match[3])
        old_count = 1 if match[2] is None else int(match[2])
        new_count = 1 if match[4] is None else int(match[4])
        lines: list[bytes] = []
        old_left, new_left = old_count, new_count
        while old_left > 0 or new_left > 0 or self.line() == NO_NEWLINE[:-1]:
            if self.at >= len(self.lines):
                self.short(old_left, new_left)
            line = self.line()
            kind = line[:1]
            if line == NO_NEWLINE[:-1] and lines:
                lines[-1] = lines[-1][:-1]
            elif kind in (b" ", b"+", b"-"):
                lines.append(line + b"\n")
                old_left -= kind != b"+"
                new_left -= kind != b"-"
            elif line == b"":
                raise PatchContextStripped(
                    "an empty context line lost its blank",
                    where=self.where(),
                    why="an editor or a hook strips line ends of patches",
                    remedy="git checkout -- patches, or: mpatch refresh; then make the editor leave *.patch alone",
                )
            else:
                self.short(old_left, new_left)
            self.at += 1
        if old_left or new_left:
            self.short(old_left, new_left)
        return Hunk(
            old_start,
            old_count,
            new_start,
            new_count,
            (match[5] or b"").decode("utf-8", "replace"),
            tuple(lines),
        )

    def short(self, old_left: int, new_left: int) -> None:
        raise PatchMalformed(
            "the hunk's line counts are wrong",
            where=self.where(),
            why=f"{old_left} old and {new_left} new lines are missing by its header",
            remedy="it was edited by hand; re-export it: mpatch refresh",
        )


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
