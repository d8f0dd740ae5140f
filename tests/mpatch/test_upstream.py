from __future__ import annotations

import pytest
from lab import plain_git, release, write_files

from tools.mpatch.style import api_breaks, check_files

CONFIGURATION = """[tool.black]
line_length = 100
skip_string_normalization = true
[tool.isort]
profile = "black"
line_length = 100
"""
PYLINTRC = "[MAIN]\nmax-line-length=100\n[MESSAGES CONTROL]\ndisable=all\nenable=C0115,C0116,W0611,C0301\n"


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "clone"
    owners = "* @X/all\nfake/core/ @X/core @X/moe\n"
    write_files(folder, {**release("moved"), "pyproject.toml": CONFIGURATION, ".github/CODEOWNERS": owners})
    plain_git(folder, "init", "-q", "-b", "main")
    plain_git(folder, "add", "-A")
    plain_git(folder, "commit", "-qm", "moved")
    return folder


def test_branch_holds_the_patch_alone_and_the_work_tree_is_untouched(three, clone):
    tests = three.root / "patches/upstream-tests/core/guard/tests/unit_tests"
    tests.mkdir(parents=True)
    (tests / "test_loss.py").write_text("# Copyright (c) NVIDIA CORPORATION.\n\n\ndef test_loss():\n    assert True\n")
    head = plain_git(clone, "rev-parse", "HEAD")
    said = three.good("upstream-prep", "guard", "--clone", str(clone), "--json")
    assert said.data["branch"] == "mpatch/guard"
    assert said.data["owners"] == ["@X/all", "@X/core", "@X/moe"]
    assert plain_git(clone, "rev-parse", "HEAD") == head
    assert plain_git(clone, "status", "--porcelain") == ""
    assert plain_git(clone, "rev-parse", "mpatch/guard^") == head
    assert plain_git(clone, "diff", "--name-only", "main", "mpatch/guard").split() == [
        "fake/core/loss.py", "tests/unit_tests/test_loss.py"]  # fmt: skip
    text = plain_git(clone, "log", "-1", "--format=%an%n%B", "mpatch/guard")
    assert text.startswith("A Tester\nChange core/guard\n\nBecause it is a test.\n")
    assert "Signed-off-by: A Tester <tester@lab.example>" in text
    assert "Upstream-Status" not in text
    draft = (three.root / said.data["draft"]).read_text()
    assert "drafts" in draft
    assert "`fake/core/loss.py`" in draft


def test_later_patch_comes_without_those_before_it_or_says_it_cannot(three, clone):
    said = three.run("upstream-prep", "core/top-k-more", "--clone", str(clone))
    assert said.code == 1
    assert "MoveConflict" in said.err


def test_patch_that_upstream_has_is_absorbed(three, clone):
    write_files(clone, {"fake/core/loss.py": release("absorbed")["fake/core/loss.py"]})
    plain_git(clone, "commit", "-qam", "same")
    assert "PatchAbsorbed" in three.run("upstream-prep", "guard", "--clone", str(clone)).err


def test_call_into_ours_is_refused(three, clone):
    three.add_patch("core/hook", "fake/train.py", "    done = 0", "    import megatron_ext\n\n    done = 0")
    said = three.run("upstream-prep", "hook", "--clone", str(clone))
    assert "StyleWrong" in said.err
    assert "megatron_ext" in said.err


def test_no_clone_there(three, tmp_path):
    said = three.run("upstream-prep", "guard", "--clone", str(tmp_path))
    assert said.code == 2
    assert "BaseMissing" in said.err


def test_style_reports_only_what_the_change_brings(tmp_path):
    old = b'"""M."""\nimport os\nx = {"a":1}\n'  # ugly and with an unused import already
    path = "megatron/core/x.py"
    configuration = {"pyproject.toml": CONFIGURATION.encode(), ".pylintrc": PYLINTRC.encode()}
    assert check_files(tmp_path, {path: old}, {path: old + b"y = 1\n"}, configuration) == []
    clean = b'"""M."""\n\nx = 1\n'
    found = check_files(tmp_path, {path: clean}, {path: clean + b"def f( a ):\n    return a\n"}, configuration)
    assert {one.check for one in found} == {"black", "pylint"}
    assert any("missing-function-docstring" in one.text for one in found)
    found = check_files(tmp_path, {}, {"megatron/core/new.py": clean}, configuration)
    assert [one.check for one in found] == ["header"]


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (b"def f(a, b=1): pass\n", []),
        (b"def f(b, a): pass\n", ["f: positional parameters moved", "f: new parameter 'b' has no default"]),
        (b"def f(): pass\n", ["f: parameter 'a' removed"]),
        (b"def f(a, *, c): pass\n", ["f: new parameter 'c' has no default"]),
    ],
)
def test_api_breaks(new, expected):
    assert sorted(api_breaks(b"def f(a): pass\n", new)) == sorted(expected)
