"""The reader of patch files: strict, by bytes.

It is our own because every byte counts here (unidiff, the usual library, reads text and forgives); the tests compare
it with unidiff and with git.
"""

from __future__ import annotations

import re

from tools.mpatch import message as mail
from tools.mpatch.errors import (
    PatchContextStripped,
    PatchHasCRLF,
    PatchKindRefused,
    PatchMalformed,
    PathEscapes,
)
from tools.mpatch.patchfile import ABSENT, FILE_MODES, NO_NEWLINE, FileChange, Hunk, Patch

HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: (.*))?$")
INDEX = re.compile(rb"^index ([0-9a-f]+)\.\.([0-9a-f]+)(?: ([0-7]{6}))?$")


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


def undo(name: str) -> str:
    """Return the remedy for a file that was edited by hand."""
    return f"git checkout -- {name}; changes go through mpatch edit and mpatch refresh"


def parse(slug: str, data: bytes, *, mend: bool = False) -> Patch:
    """Read a patch file. With `mend` an empty line in a hunk is taken for an empty context line.

    Raises:
        PatchHasCRLF: line ends were converted by a checkout.
        PatchMalformed: anything else that is not the canonical form; subclasses name the cause.
    """
    name = f"patches/{slug}.patch"
    if b"\r\n" in data[: data.find(b"\n") + 1]:
        raise PatchHasCRLF(
            "the patch has CRLF line ends",
            where=f"{name}:1",
            why="a checkout converted it; a patch is bytes",
            remedy="put `*.patch -text` into .gitattributes, then: rm -r patches && git checkout -- patches",
        )
    start = data.find(b"\ndiff --git ")
    if start < 0:
        raise PatchMalformed(
            "the file holds no diff",
            where=name,
            why="no line starts with `diff --git `",
            remedy=f"a patch that changes nothing is an error\n{undo(name)}",
        )
    said = mail.parse(data[: start + 1], name)
    reader = _Reader(name, data[start + 1 :].split(b"\n"), data[: start + 1].count(b"\n"), mend)
    if data[-1:] != b"\n":
        raise PatchMalformed("the file ends in the middle of a line", where=name, remedy=undo(name))
    changes = tuple(reader.changes())
    paths = [change.path for change in changes]
    if len(set(paths)) != len(paths):
        raise PatchMalformed("a file is named twice", where=name, remedy=undo(name))
    return Patch(slug, said, changes)


class _Reader:
    """Walks the lines of the diff part; `at` is the line it looks at."""

    def __init__(self, name: str, lines: list[bytes], offset: int, mend: bool) -> None:
        self.name, self.lines, self.offset, self.at, self.mend = name, lines[:-1], offset, 0, mend

    def slug(self) -> str:
        return self.name.removeprefix("patches/").removesuffix(".patch")

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
                remedy=undo(self.name),
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
                remedy=undo(self.name),
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
            remedy=undo(self.name),
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
                    remedy=undo(self.name),
                )
        hunks = []
        while self.line().startswith(b"@@"):
            hunks.append(self.hunk())
        if not hunks:
            raise PatchMalformed("no hunk", where=self.where(), remedy=undo(self.name))
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
            line = self.line() or (b" " if self.mend else b"")
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
                    remedy=f"{undo(self.name)}\nor mend it: mpatch refresh {self.slug()} --from-file\n"
                    "and make the editor leave *.patch alone",
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
            remedy=undo(self.name),
        )
