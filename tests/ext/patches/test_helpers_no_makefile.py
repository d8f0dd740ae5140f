"""Proof of helpers-no-makefile: nothing is compiled at the start of training where the helper is there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import megatron.core.datasets as datasets
import pytest
from megatron.core.datasets.utils import compile_helpers


def test_compile_helpers_uses_the_compiled_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helpers_cpp.py").write_text("")
    monkeypatch.setattr(datasets, "__path__", [*datasets.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    compile_helpers()  # the released one runs make without a Makefile and exits the process


def test_compile_helpers_still_says_so_when_there_is_no_helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "megatron.core.datasets.helpers_cpp", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(SystemExit):
        compile_helpers()
