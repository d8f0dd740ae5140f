from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest
from lab import REPOSITORY, write_files

from megatron_ext import guard
from megatron_ext.errors import UserError
from tools.mpatch import doctor
from tools.mpatch.checkout import Checkout

MEGATRON = {
    "megatron/core/__init__.py": 'raise SystemExit("doctor imported megatron.core")\n',
    "megatron/core/router.py": "x = 1\n",
    "megatron/training/__init__.py": "",
    "megatron/training/loop.py": "y = 1\n",
}


@pytest.fixture(scope="module")
def plain_python(tmp_path_factory):
    """An environment with nothing in it."""
    folder = tmp_path_factory.mktemp("venv") / "v"
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


@pytest.fixture
def tree(lab):
    """A lab whose release looks like Megatron."""
    lab.add_base("meg", MEGATRON)
    pins = lab.root / "upstream.toml"
    text = pins.read_text().replace('default_base = "1.0"', 'default_base = "meg"')
    pins.write_text(text + '\n[packages]\napex = "25.09"\ntorch = "2.11.0"\n')
    lab.apply()
    return lab


def look(lab, python, monkeypatch, *paths):
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, paths)))
    said = lab.run("doctor", "--python", str(python), "--json")
    return said.code, {fact["name"]: fact for fact in said.data["facts"]}


def test_patched_tree_first_is_good_but_torch_is_missing(tree, plain_python, monkeypatch):
    code, facts = look(tree, plain_python, monkeypatch, tree.tree)
    assert facts["first on the path"]["state"] == "good"
    assert facts["patched files"]["found"] == "4 modules, all as recorded"
    assert facts["torch"]["state"] == "bad"
    assert facts["triton"]["state"] == "bad"
    assert facts["apex"] == {
        "name": "apex", "state": "note", "found": "missing", "cost": facts["apex"]["cost"],
        "remedy": "build it from its repository with --cpp_ext --cuda_ext, version 25.09",
    }  # fmt: skip
    assert code == 1


def test_awsome_distributed_ai437_megatron_lm870_mixed_namespace_names_both(tree, plain_python, monkeypatch, tmp_path):
    """core from site-packages, training from a checkout"""
    other = tmp_path / "site-packages"
    write_files(other, {name: text for name, text in MEGATRON.items() if "/core/" in name})
    shutil.rmtree(tree.tree / "megatron/core")
    code, facts = look(tree, plain_python, monkeypatch, tree.tree, other)
    mixed = facts["mixed namespace"]["found"]
    assert code == 1
    assert f"core: 2 files from {other}" in mixed
    assert f"training: 2 files from {tree.tree}" in mixed


def test_unpatched_first_on_the_path(tree, plain_python, monkeypatch, tmp_path):
    write_files(tmp_path / "wheel", MEGATRON)
    _, facts = look(tree, plain_python, monkeypatch, tmp_path / "wheel", tree.tree)
    assert facts["first on the path"]["state"] == "bad"
    assert str(tmp_path / "wheel") in facts["first on the path"]["found"]


def test_changed_file_and_hiding_package(tree, plain_python, monkeypatch, tmp_path):
    (tree.tree / "megatron/core/router.py").write_text("x = 2\n")
    _, facts = look(tree, plain_python, monkeypatch, tree.tree)
    assert "megatron.core.router" in facts["patched files"]["found"]
    write_files(tmp_path / "hide", {"megatron/__init__.py": ""})
    _, facts = look(tree, plain_python, monkeypatch, tmp_path / "hide", tree.tree)
    assert "hides" in facts["first on the path"]["cost"]


def test_stale_bytecode(tree, plain_python, monkeypatch):
    source = tree.tree / "megatron/training/loop.py"
    cache = [sys.executable, "-c", "import py_compile,sys; py_compile.compile(sys.argv[1], "
             "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)", str(source)]  # fmt: skip
    subprocess.run(cache, check=True)
    _, facts = look(tree, plain_python, monkeypatch, tree.tree)
    assert facts["bytecode"]["state"] == "bad"
    assert "loop" in facts["bytecode"]["found"]


def test_wrong_python(tree):
    old = {"python": "3.11.7"}
    fact = doctor._python_fact(old, Checkout(tree.root).pins())
    assert fact.state == "bad"
    assert doctor._python_fact({"python": "3.13.0"}, Checkout(tree.root).pins()).state == "good"


def test_mpatch_imports_neither_torch_nor_megatron():
    code = ("import sys, pkgutil, importlib, tools.mpatch as m\n"
            "[importlib.import_module(f'tools.mpatch.{one.name}') for one in pkgutil.iter_modules(m.__path__)"
            " if one.name != '__main__']\n"
            "print(sorted({'torch', 'megatron', 'megatron_ext', 'unidiff', 'numpy'} & set(sys.modules)))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "[]"


def module(name: str, file: Path) -> dict[str, ModuleType]:
    made = ModuleType(name)
    made.__file__ = str(file)
    return {name: made, "unrelated": ModuleType("unrelated")}


@pytest.fixture
def record(tmp_path):
    write_files(tmp_path / "patched", MEGATRON)
    files = {name: guard.blob_id(text.encode()) for name, text in MEGATRON.items()}
    return guard.Record(tmp_path / "patched", files)


def test_guard_passes_the_patched_file(record):
    file = record.root / "megatron/core/router.py"
    assert guard.check_imported(module("megatron.core.router", file), record) == 1


def test_guard_names_both_paths(record, tmp_path):
    write_files(tmp_path / "wheel", MEGATRON)
    file = tmp_path / "wheel/megatron/core/router.py"
    with pytest.raises(UserError) as refused:
        guard.check_imported(module("megatron.core.router", file), record)
    assert str(file) in refused.value.text()
    assert str(record.root / "megatron/core/router.py") in refused.value.text()


def test_guard_sees_a_changed_file(record):
    file = record.root / "megatron/core/router.py"
    file.write_text("x = 3\n")
    with pytest.raises(UserError, match="changed after it was patched"):
        guard.check_imported(module("megatron.core.router", file), record)


def test_guard_follows_the_tree_of_a_proof(tmp_path, monkeypatch):
    monkeypatch.setenv("MPATCH_TREE", str(tmp_path))
    assert guard.load_record() == guard.Record(tmp_path.resolve(), {})
