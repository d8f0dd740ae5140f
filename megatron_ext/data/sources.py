"""Where documents come from: text files, directories of them, JSON lines.

A text file is one document. A JSON-lines file (`.jsonl`, `.jsonl.gz`) holds one document a line, under a key.
A directory is walked in sorted order for the suffixes below; hidden names are left out. The order of
documents is therefore the same on every machine that holds the same files.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import UserError

TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py"})
LINES_SUFFIXES = (".jsonl", ".jsonl.gz")
LABEL_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


@dataclass(frozen=True)
class SourceFile:
    """One input file: its path, its size in bytes, and whether the user named it (rather than its directory).
    """

    path: Path
    size_bytes: int
    named: bool


@dataclass(frozen=True)
class Source:
    """A label, as it goes into the manifest, and the files whose documents carry it."""

    label: str
    files: tuple[SourceFile, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files as they lie on disk."""
        return sum(file.size_bytes for file in self.files)


def find_sources(inputs: list[str]) -> list[Source]:
    """Resolve `LABEL=PATH` or `PATH` words into sources; the same label twice is one source.

    Raises:
        UserError: A path is missing or unreadable, a label is unusable, or nothing under a path can be read
            as text.
    """
    if not inputs:
        raise UserError(
            "there is nothing to tokenize",
            where="--input",
            remedy="name a text file, a directory or a JSON-lines "
            "file, e.g. --input prose=books/ --input code=src/",
            exit_code=64,
        )
    by_label: dict[str, list[SourceFile]] = {}
    for word in inputs:
        label, path = _split_label(word)
        by_label.setdefault(label, []).extend(_find_files(path))
    return [Source(label, tuple(files)) for label, files in by_label.items()]


def read_documents(
    file: SourceFile, json_key: str, on_bytes: Callable[[int], None] = lambda _: None
) -> Iterator[str]:
    """Yield the documents of one file, none of them empty; `on_bytes` hears how much of the file is done.

    Raises:
        UserError: Not UTF-8 (with the offset of the first bad byte), not JSON, or the key is missing or no
            text.
    """
    try:
        if file.path.name.endswith(LINES_SUFFIXES):
            yield from _read_lines(file, json_key)
        else:
            text = _decode(file.path.read_bytes(), file.path)
            if text.strip():
                yield text
    except (OSError, EOFError) as error:
        raise UserError(
            "an input file cannot be read",
            where=str(file.path),
            why=str(error),
            remedy="check its permissions and that it is complete, or leave it out",
        ) from error
    on_bytes(file.size_bytes)


def _split_label(word: str) -> tuple[str, Path]:
    label, mark, rest = word.partition("=")
    path = Path(rest if mark else word)
    if not mark:
        label = path.name.split(".")[0] or "text"
        label = "".join(c if c in LABEL_CHARACTERS else "-" for c in label)
    if not label or set(label) - LABEL_CHARACTERS:
        raise UserError(
            f"{label!r} cannot be a label",
            where=f"--input {word}",
            why="labels become file names and metric names",
            remedy="use letters, digits, - and _, e.g. --input prose=PATH",
            exit_code=64,
        )
    return label, path


def _find_files(path: Path) -> list[SourceFile]:
    try:
        if path.is_dir():
            return _walk(path)
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except OSError as error:
        raise UserError(
            "an input cannot be read",
            where=str(path),
            why=error.strerror or str(error),
            remedy="check the path and its permissions",
        ) from error
    file = SourceFile(path, size, named=True)
    if not path.name.endswith(LINES_SUFFIXES) and not path.read_bytes().strip():
        raise UserError(
            "an input file is empty",
            where=str(path),
            why=f"{size} bytes, none of them text",
            remedy="leave it out, or look at what should have written it",
        )
    return [file]


def _walk(root: Path) -> list[SourceFile]:
    found = []
    for path in sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        wanted = path.suffix in TEXT_SUFFIXES or path.name.endswith(LINES_SUFFIXES)
        if wanted and not hidden and path.is_file():
            found.append(SourceFile(path, path.stat().st_size, named=False))
    if not found:
        kinds = ", ".join(sorted(TEXT_SUFFIXES | set(LINES_SUFFIXES)))
        raise UserError(
            "no text under a directory",
            where=str(root),
            why=f"looked for {kinds}",
            remedy="name the files themselves, whatever their suffix, or another directory",
        )
    return found


def _read_lines(file: SourceFile, key: str) -> Iterator[str]:
    opener = gzip.open if file.path.name.endswith(".gz") else open
    offset = 0
    with opener(file.path, "rb") as stream:
        for number, raw in enumerate(stream, start=1):
            line = _decode(raw, file.path, offset)
            offset += len(raw)
            if line.strip() and (text := _text_of(line, key, file.path, number)).strip():
                yield text


def _text_of(line: str, key: str, path: Path, number: int) -> str:
    where = f"{path}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            "a line is not JSON",
            where=where,
            why=str(error),
            remedy="one JSON object a line; mend or drop the line",
        ) from error
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        have = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
        raise UserError(
            f"a line has no text under {key!r}",
            where=where,
            why=f"it has: {have}",
            remedy="name the right key with --json-key",
        )
    return text


def _decode(raw: bytes, path: Path, offset: int = 0) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            "an input file is not UTF-8",
            where=f"{path}, byte offset {offset + error.start}",
            why=f"{error.reason}: 0x{raw[error.start]:02x}",
            remedy="convert it first, e.g. iconv -f LATIN1 -t UTF-8 IN > OUT, or leave it out",
        ) from error
