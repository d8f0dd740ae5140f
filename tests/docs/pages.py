"""Reading our Markdown pages: links, headings, code blocks and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = {"&&", "||", "|", ";", "&", ">", "<", ">>", "2>&1"}


@dataclass(frozen=True)
class Command:
    """A command of ours in a code block: its page and line, and its words from the command's name on."""

    page: str
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {' '.join(self.words[:3])}"


def pages() -> list[Path]:
    """Return every page that is ours."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "patches/README.md",
            ROOT / "tools/requirements/README.md"]  # fmt: skip


def tokens(page: Path) -> list[Token]:
    """Return the parsed page."""
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, target) of every link and image."""
    for block in tokens(page):
        for token in block.children or []:
            target = token.attrGet("href") or token.attrGet("src")
            if target is not None:
                yield (block.map or [0])[0] + 1, str(target)


def anchors(page: Path) -> set[str]:
    """Return the names by which the headings of a page can be reached, as GitHub makes them."""
    found: set[str] = set()
    stream = tokens(page)
    for token, inner in pairwise(stream):
        if token.type == "heading_open":
            text = "".join(child.content for child in inner.children or [] if child.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            number = next(n for n in range(1000) if (slug if n == 0 else f"{slug}-{n}") not in found)
            found.add(slug if number == 0 else f"{slug}-{number}")
    return found


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) of every code block that may hold commands."""
    for token in tokens(page):
        if token.type == "code_block" or (token.type == "fence" and token.info in ("", "bash", "sh", "console")):
            yield (token.map or [0])[0] + (2 if token.type == "fence" else 1), token.content


def commands(page: Path, *names: str) -> Iterator[Command]:
    """Yield each call of the named programs; a line that bash continues is one line."""
    for first, text in blocks(page):
        line = first
        for logical in re.split(r"(?<!\\)\n", text):
            for words in _calls(logical.replace("\\\n", " ")):
                program, *rest = _program(words)
                if program in names:
                    yield Command(str(page.relative_to(ROOT)), line, (program, *rest))
            line += logical.count("\n") + 1
    for block in tokens(page):
        for token in block.children or []:
            # In running text: whole commands, not forms with dots or brackets, nor a name alone.
            if token.type == "code_inline" and not re.search(r"\.\.\.|[\[\]|…]", token.content):
                for words in _calls(token.content):
                    program, *rest = _program(words)
                    if program in names and len(rest) > 1:
                        yield Command(str(page.relative_to(ROOT)), (block.map or [0])[0] + 1, (program, *rest))


def _program(words: list[str]) -> list[str]:
    """Return a call from its program on: behind assignments, or what torchrun starts.

    Variables, and the N of a form, get the value 1.
    """
    at = words.index("--no-python") + 1 if "--no-python" in words else 0
    while at < len(words) - 1 and re.fullmatch(r"\w+=.*", words[at]):
        at += 1
    rest = [re.sub(r"\$\{?\w+\}?|^[A-Z]$", "1", word) for word in words[at + 1 :]]
    return [words[at].rpartition("/")[2], *rest] if at < len(words) else [""]


def _calls(line: str) -> Iterator[list[str]]:
    try:
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split = True
        words = list(reader)
    except ValueError:
        return  # a line of prose or of another language
    call: list[str] = []
    for word in [*words, ";"]:
        if word in OPERATORS:
            if call:
                yield call
            call = []
        else:
            call.append(word)
