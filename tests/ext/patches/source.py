"""Reading Megatron's source as a syntax tree, for proofs about a call that is only reached in a long run."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def source_of(module: str) -> str:
    """Return the source of a module of the tree under test, without importing the module itself."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def function(module: str, name: str) -> ast.FunctionDef:
    """Return a function or method by name; it must stand exactly once in the module."""
    found = [n for n in ast.walk(ast.parse(source_of(module))) if isinstance(n, ast.FunctionDef) and n.name == name]
    assert len(found) == 1, f"{name} stands {len(found)} times in {module}"
    return found[0]


def calls(node: ast.AST) -> list[str]:
    """Return the dotted names that are called anywhere inside a node."""
    return [ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)]
