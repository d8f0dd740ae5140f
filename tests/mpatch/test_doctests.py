from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import tools.mpatch

NAMES = [one.name for one in pkgutil.iter_modules(tools.mpatch.__path__) if one.name != "__main__"]


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"tools.mpatch.{name}"))
    assert result.failed == 0


def test_some_examples_exist():
    found = [doctest.testmod(importlib.import_module(f"tools.mpatch.{name}")).attempted for name in NAMES]
    assert sum(found) >= 20
