"""Upstream's own checks on the files that a patch touches: black, isort, pylint, header, public names.

Their configuration is read from their clone (pyproject.toml, .pylintrc), their versions are locked beside ours. Only
what the change brings in is reported: upstream's own sins stay upstream's.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Upstream formats only these folders (tools/autoformat.sh).
FORMATTED = ("megatron/core/", "tests/unit_tests/")
CONFIGURATION = ("pyproject.toml", ".pylintrc")
BLACK = ("black", "-q", "--check", "--skip-magic-trailing-comma", "--skip-string-normalization")
ISORT = ("isort", "-q", "--check-only")
PYLINT = ("pylint", "--score=n", "--reports=n", "--msg-template={symbol}: {obj}: {msg}")
HEADER = "NVIDIA"


@dataclass(frozen=True)
class StyleFinding:
    """One thing that upstream's checks would refuse."""

    check: str
    path: str
    text: str


def check_files(
    folder: Path,
    before: Mapping[str, bytes | None],
    after: Mapping[str, bytes | None],
    configuration: Mapping[str, bytes],
) -> list[StyleFinding]:
    """Run the checks on both versions in a folder of its own; return what is new.

    Args:
        folder: Empty; files are written there.
        before: Content by path, None where the file is new.
        after: Content by path, None where the file is removed.
        configuration: Upstream's configuration files by name.
    """
    for name, data in configuration.items():
        (folder / name).write_bytes(data)
    found: list[StyleFinding] = []
    for path, new in after.items():
        if new is None or not path.endswith(".py"):
            continue
        old = before.get(path)
        if path.startswith(FORMATTED):
            ours = _tools(folder, path, new)
            # Upstream's version is looked at only when there is something to compare: pylint takes its time.
            known = _tools(folder, path, old) if ours and old is not None else []
            found += [StyleFinding(*one) for one in ours if one not in known]
        if old is None and HEADER not in new[:400].decode("utf-8", "replace"):
            found.append(StyleFinding("header", path, "a new file starts with NVIDIA's copyright line"))
        if old is not None:
            found += [StyleFinding("api", path, text) for text in api_breaks(old, new)]
    return found


def _tools(folder: Path, path: str, data: bytes) -> list[tuple[str, str, str]]:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    found = []
    for words in (BLACK, ISORT):
        if _run(folder, words, path).returncode:
            found.append((words[0], path, f"{words[0]} would change it"))
    if not path.startswith("tests/"):
        found += [("pylint", path, line) for line in _run(folder, PYLINT, path).stdout.splitlines() if ": " in line]
    return found


def _run(folder: Path, words: tuple[str, ...], path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words, path], cwd=folder, stdin=subprocess.DEVNULL, text=True,
                          capture_output=True, check=False, timeout=300)  # fmt: skip


def api_breaks(old: bytes, new: bytes) -> list[str]:
    r"""Return what callers of a module would trip over.

    >>> api_breaks(b"def f(a): pass\ndef g(): pass\n", b"def f(a, b): pass\n")
    ["f: new parameter 'b' has no default", 'g: removed']
    >>> api_breaks(b"def f(a): pass\n", b"def f(a, *, b=1): pass\n")
    []
    """
    before, after = _signatures(ast.parse(old)), _signatures(ast.parse(new))
    found = []
    for name, arguments in before.items():
        if name not in after:
            found.append(f"{name}: removed")
            continue
        now = after[name]
        if arguments is not None and now is not None:
            found += [f"{name}: {text}" for text in _breaks(arguments, now)]
    return sorted(found)


def _signatures(tree: ast.Module, prefix: str = "") -> dict[str, ast.arguments | None]:
    found: dict[str, ast.arguments | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found[node.name] = None
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and (inner.name == "__init__" or inner.name[0] != "_"):
                    found[f"{node.name}.{inner.name}"] = inner.args
    for top in tree.body:
        if isinstance(top, ast.FunctionDef | ast.AsyncFunctionDef) and not top.name.startswith("_"):
            found[top.name] = top.args
    return found


def _breaks(old: ast.arguments, new: ast.arguments) -> list[str]:
    had = [one.arg for one in (*old.posonlyargs, *old.args)]
    has = [one.arg for one in (*new.posonlyargs, *new.args)]
    found = [f"parameter {name!r} removed" for name in had if name not in has and new.kwarg is None]
    if not found and has[: len(had)] != had:
        found.append("positional parameters moved")
    without_default = has[: len(has) - len(new.defaults)]
    found += [f"new parameter {name!r} has no default" for name in without_default if name not in had]
    keywords = {one.arg for one in old.kwonlyargs}
    for one, default in zip(new.kwonlyargs, new.kw_defaults, strict=True):
        if one.arg not in keywords and default is None:
            found.append(f"new parameter {one.arg!r} has no default")
    return found
