"""The API reference: every public name is documented, errors by name, and the pages are built without a gap."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT

from tools.setup.reference import rooms

FILES = sorted((ROOT / "megatron_ext").rglob("*.py"))


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    told, bare = 0, []
    for room in rooms():
        module = importlib.import_module(room)
        assert (module.__doc__ or "").strip(), room
        for name in getattr(module, "__all__", ()):
            public = getattr(module, name)
            if inspect.isclass(public) or inspect.isroutine(public):
                told += 1
                if not (public.__doc__ or "").strip():
                    bare.append(f"{room}.{name}")
    assert told > 30
    assert bare == []


def _public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public(node.body)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node


def _raised(function: ast.FunctionDef) -> set[str]:
    """Return the classes that the body raises by name; an assertion is for our own mistakes."""
    # What is raised within a `try` is mostly meant for its own `except`.
    inner = {id(node) for block in ast.walk(function) if isinstance(block, ast.Try)
             for part in block.body for node in ast.walk(part)}  # fmt: skip
    raises = [node for node in ast.walk(function) if isinstance(node, ast.Raise) and id(node) not in inner]
    calls = [node.exc for node in raises if isinstance(node.exc, ast.Call)]
    names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    return {name for name in names if name.endswith("Error") and name != "AssertionError"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "megatron_ext")))
def test_a_public_function_names_the_errors_that_it_raises(file: Path) -> None:
    silent = [
        f"{function.name}: {error}"
        for function in _public(ast.parse(file.read_text()).body)
        for error in _raised(function)
        if error not in (ast.get_docstring(function) or "")
    ]
    assert silent == []


@pytest.mark.nightly
def test_the_pages_are_built_and_open_offline(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/setup/reference.py"), str(tmp_path / "api")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    for room in rooms():
        page = tmp_path / "api" / (room.replace(".", "/") + ".html")
        text = page.read_text()
        for name in getattr(importlib.import_module(room), "__all__", ()):
            assert f'id="{name}"' in text, f"{room}.{name}"
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="([^"]+)"', text)
        assert [address for address in loaded if "://" in address] == []
