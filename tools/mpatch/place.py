"""In which class and function a line of Python stands: the guard against hunks that land in a like place."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

HEADER = re.compile(r"^(\s*)(?:async\s+)?(?:class|def)\s+(\w+)")


@dataclass(frozen=True)
class Span:
    """A class or def: its dotted path, first and last line (from 1)."""

    path: str
    first: int
    last: int


def spans(source: bytes) -> list[Span]:
    r"""Return all classes and defs, outer ones first.

    >>> spans(b"class A:\n    def f(self):\n        pass\n")
    [Span(path='A', first=1, last=3), Span(path='A.f', first=2, last=3)]
    """
    text = source.decode("utf-8", "replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # upstream's invalid escapes are not ours to report
            return list(_walk(ast.parse(text), ""))
    except (SyntaxError, ValueError, RecursionError):
        return _scan(text.split("\n"))  # syntax newer than this Python, or a file in the middle of a conflict


def _walk(node: ast.AST, prefix: str) -> list[Span]:
    found: list[Span] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            path = f"{prefix}{child.name}"
            found.append(Span(path, child.lineno, child.end_lineno or child.lineno))
            found += _walk(child, f"{path}.")
        else:
            found += _walk(child, prefix)
    return found


def _scan(lines: list[str]) -> list[Span]:
    """Guess from indentation; closing brackets and blank lines do not end a def."""
    open_: list[tuple[int, str, int]] = []
    found: list[Span] = []

    def close(indent: int, last: int) -> None:
        while open_ and open_[-1][0] >= indent:
            _, path, first = open_.pop()
            found.append(Span(path, first, last))

    last_code = 0
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if not stripped or stripped[0] in "#)]}":
            continue
        match = HEADER.match(line)
        close(len(line) - len(line.lstrip()), last_code)
        if match:
            prefix = f"{open_[-1][1]}." if open_ else ""
            open_.append((len(match[1]), prefix + match[2], number))
        last_code = number
    close(0, last_code)
    return sorted(found, key=lambda span: span.first)


def place_of(path: str, source: bytes, line: int, known: list[Span] | None = None) -> str:
    r"""Return the dotted def path of a line (from 1), empty at module level or in other languages.

    >>> place_of("a.py", b"class A:\n    def f(self):\n        pass\n", 3)
    'A.f'
    """
    if not path.endswith(".py"):
        return ""
    inside = [span for span in (spans(source) if known is None else known) if span.first <= line <= span.last]
    return max(inside, key=lambda span: span.path.count(".")).path if inside else ""
