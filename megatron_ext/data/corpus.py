"""A small corpus that every Python carries, for the quickstart and for tests: prose and code, nothing
downloaded.

Prose is the language reference that `help()` shows (`pydoc_data.topics`), then docstrings of standard
modules. Code is the sources of other standard modules, so that no docstring sits in both. Same Python, same
corpus.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megatron_ext.data.files import write_json, write_text
from megatron_ext.errors import UserError

PROSE_BYTES = 1_000_000
CODE_BYTES = 1_500_000
# Long texts are cut at paragraphs and top-level definitions into documents of about this size: hundreds of
# them, so that a few per cent held out are still a fair sample.
DOCUMENT_BYTES = 4_000
# One module must not be most of what a small model sees.
MODULE_BYTES = 60_000
# Tables, generated files and tests are neither prose nor typical code.
LEFT_OUT = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "idle_test",
        "turtledemo",
        "lib2to3",
        "ensurepip",
        "encodings",
        "pydoc_data",
        "__pycache__",
        "config",
        "__phello__",
        "lib-dynload",
    }
)


@dataclass(frozen=True)
class Corpus:
    """Where the corpus lies and how much of it there is: label -> (documents, bytes of text)."""

    directory: Path
    sizes: dict[str, tuple[int, int]]

    @property
    def inputs(self) -> list[str]:
        """The words for `--input`."""
        return [f"{label}={self.directory / label}" for label in self.sizes]


def write_corpus(directory: Path) -> Corpus:
    """Write prose and code under `directory`, one file a document; a second call changes nothing.

    Raises:
        UserError: This Python lacks its documentation topics or its library sources.
    """
    documents = {"prose": dict(_take(_prose(), PROSE_BYTES)), "code": dict(_take(_code(), CODE_BYTES))}
    if not documents["prose"] or not documents["code"]:
        raise UserError(
            "this Python carries no text to train on",
            where=sysconfig.get_path("stdlib"),
            why="pydoc_data.topics or the library's sources are missing",
            remedy="use a Python with its full standard library, or your own text with --input",
        )
    sizes = {}
    for label, texts in documents.items():
        for name, text in texts.items():
            path = directory / label / name
            # An unchanged file keeps its time, and so finished shards of it stay valid.
            if not path.is_file() or path.read_bytes() != text.encode():
                write_text(path, text)
        for stray in set(directory.joinpath(label).iterdir()) - {directory / label / name for name in texts}:
            stray.unlink()
        sizes[label] = (len(texts), sum(len(text.encode()) for text in texts.values()))
    write_json(
        directory / "corpus.json",
        {
            "python": platform.python_version(),
            "sizes": {label: {"documents": count, "bytes": size} for label, (count, size) in sizes.items()},
        },
    )
    return Corpus(directory, sizes)


def _take(documents: Iterator[tuple[str, str]], limit_bytes: int) -> Iterator[tuple[str, str]]:
    used = 0
    for name, text in documents:
        size = len(text.encode())
        if used + size <= limit_bytes:
            used += size
            yield name, text


def _prose() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name in sorted(topics):
        yield from _numbered(f"topic-{name}", ".txt", _packed(_paragraphs(topics[name])))
    for name, path in _modules(code=False):
        yield from _numbered(f"doc-{name}", ".txt", _packed(_paragraphs(_docstrings(path))))


def _code() -> Iterator[tuple[str, str]]:
    for name, path in _modules(code=True):
        text = _source(path)
        if len(text.encode()) <= MODULE_BYTES:
            yield from _numbered(name, ".py", _packed(_definitions(text)))


def _numbered(name: str, suffix: str, texts: Iterator[str]) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(texts):
        yield f"{name}-{number:02d}{suffix}", text


def _packed(pieces: list[str]) -> Iterator[str]:
    """Join neighbours into documents of at least DOCUMENT_BYTES, the last one whatever is left."""
    held = ""
    for piece in pieces:
        held += piece
        if len(held.encode()) >= DOCUMENT_BYTES:
            yield held
            held = ""
    if held.strip():
        yield held


def _paragraphs(text: str) -> list[str]:
    return [f"{paragraph}\n\n" for paragraph in text.split("\n\n") if paragraph.strip()]


def _definitions(text: str) -> list[str]:
    """Cut source text at its top-level statements; joined again they are the text."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return []
    decorated = [
        min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) for node in body
    ]
    lines = text.splitlines(keepends=True)
    starts = [0, *(line - 1 for line in decorated[1:]), len(lines)]
    return ["".join(lines[a:b]) for a, b in pairwise(starts)]


def _modules(*, code: bool) -> list[tuple[str, Path]]:
    """Return (dotted name, path) of half of the standard modules, in an order that mixes their subjects."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if (
            LEFT_OUT.isdisjoint(parts)
            and not path.name.startswith("_sysconfigdata")
            and not parts[0].startswith("config-")
        ):
            name = ".".join(parts)
            digest = hashlib.sha256(name.encode()).hexdigest()
            # Two thirds of the modules give code.
            if (int(digest, 16) % 3 != 0) == code:
                found.append((digest, name, path))
    return [(name, path) for _, name, path in sorted(found)]


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _docstrings(path: Path) -> str:
    try:
        tree = ast.parse(_source(path))
    except SyntaxError:
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(text for text in found if text)
