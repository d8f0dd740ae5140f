"""Proof of deepep-import-guard: a DeepEP that cannot be imported never takes Megatron down with it."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest


def _load(monkeypatch: pytest.MonkeyPatch, folder: Path, deep_ep: str | None) -> tuple[ModuleType, list[str]]:
    """Load a second copy of fused_a2a beside a fake deep_ep package; return it and the warnings."""
    for name in [n for n in sys.modules if n.split(".")[0] == "deep_ep"]:
        monkeypatch.delitem(sys.modules, name)
    if deep_ep is not None:
        (folder / "deep_ep").mkdir()
        (folder / "deep_ep" / "__init__.py").write_text(deep_ep)
        monkeypatch.syspath_prepend(str(folder))
    else:
        monkeypatch.setitem(sys.modules, "deep_ep", None)
    found = importlib.util.find_spec("megatron.core.transformer.moe.fused_a2a")
    assert found is not None
    assert found.origin is not None
    spec = importlib.util.spec_from_file_location("fused_a2a_under_test", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec.loader.exec_module(module)
    return module, [str(w.message) for w in caught if "DeepEP" in str(w.message)]


@pytest.mark.parametrize(
    "broken",
    [
        "assert False, 'needs NVSHMEM'",
        "raise OSError('libdeep_ep.so')",
        "raise RuntimeError('driver')",
        "import not_there_at_all",
    ],
)
def test_broken_deepep_is_off_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str) -> None:
    module, said = _load(monkeypatch, tmp_path, broken)
    assert not module.HAVE_DEEP_EP
    assert not module.HAVE_HYBRIDEP
    assert module.fused_dispatch is None
    assert len(said) == 1
    assert "cannot be used" in said[0]


def test_absent_deepep_is_off_in_silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, said = _load(monkeypatch, tmp_path, None)
    assert not module.HAVE_DEEP_EP
    assert said == []


def test_deepep_without_hybrid_is_on_in_silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = (
        "Buffer = None\n"
        "import sys, types\n"
        "utils = types.ModuleType('deep_ep.utils')\n"
        "utils.EventHandle = utils.EventOverlap = None\n"
        "sys.modules['deep_ep.utils'] = utils\n"
    )
    module, said = _load(monkeypatch, tmp_path, source)
    assert module.HAVE_DEEP_EP
    assert not module.HAVE_HYBRIDEP
    assert said == []
