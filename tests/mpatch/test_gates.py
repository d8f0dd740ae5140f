"""The gates on the real series and the real release. `make test` runs them once; they take seconds."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
from pathlib import Path

import pytest
from lab import REPOSITORY, Lab

from tools.mpatch.checkout import Checkout
from tools.mpatch.series import load_series

pytestmark = pytest.mark.gate


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Lab:
    """A checkout of its own with the real pins and patches; downloads are shared with the repository's."""
    root = tmp_path_factory.mktemp("real") / "checkout"
    root.mkdir()
    for name in ("upstream.toml", "patches", "tests"):
        (root / name).symlink_to(REPOSITORY / name)
    os.environ.setdefault("MPATCH_CACHE", str(REPOSITORY / "build" / "cache"))
    lab = Lab(root, root)
    lab.good("apply")
    return lab


def test_lint_alone_prefixes_round_trip(real):
    said = real.run("check", "--json")
    assert said.code == 0, said.err
    count = len(load_series(Checkout(REPOSITORY)).patches)
    assert count > 0
    assert said.data["alone"]["checked"] == said.data["round trip"]["checked"] == count


def test_apply_and_verify_every_blob(real):
    said = real.good("verify", "--json")
    assert said.data["files_checked"] >= 556
    assert said.data["blobs_checked"] >= len(said.data["patches"])
    assert "already applied" in real.good("apply").out


def test_tree_in_use_is_the_one_that_the_series_gives(real):
    ours = json.loads((REPOSITORY / "build" / "pins.json").read_text())
    assert ours["patched_tree"] == real.good("verify", "--json").data["patched_tree"], "run: mpatch apply"


def test_hostile_git_configuration_changes_nothing(real, hostile, tmp_path):
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("upstream.toml", "patches", "tests"):
        (root / name).symlink_to(REPOSITORY / name)
    other = Lab(root, root)
    expected = real.good("verify", "--json").data["patched_tree"]
    assert other.good("apply", "--json").data["patched_tree"] == expected
    assert other.good("check", "round-trip").code == 0
    assert other.good("verify").code == 0
    assert not (hostile / "hook-ran").exists()


def test_crlf_checkout_is_named_for_every_patch(real, tmp_path):
    root = tmp_path / "checkout"
    (root / "patches").mkdir(parents=True)
    (root / "upstream.toml").symlink_to(REPOSITORY / "upstream.toml")
    slugs = load_series(Checkout(REPOSITORY)).slugs()
    for name in ["series", *(f"{slug}.patch" for slug in slugs)]:
        (root / "patches" / name).parent.mkdir(exist_ok=True)
        (root / "patches" / name).write_bytes((REPOSITORY / "patches" / name).read_bytes().replace(b"\n", b"\r\n"))
    said = Lab(root, root).run("apply")
    assert said.code == 1
    assert said.err.count("[PatchHasCRLF]") == len(slugs)
    assert not (root / "build" / "megatron").exists()


def test_git_attributes_keep_patches_as_bytes():
    assert "*.patch -text" in (REPOSITORY / ".gitattributes").read_text().splitlines()


def hook_calls() -> list[tuple[str, str, ast.Call]]:
    """Return (slug, module, call) of each line that a patch adds to call megatron_ext."""
    found = []
    for patch in load_series(Checkout(REPOSITORY)).patches:
        added = b"".join(line[1:] for change in patch.changes for hunk in change.hunks for line in hunk.lines
                         if line[:1] == b"+").decode()  # fmt: skip
        for line in map(str.strip, added.splitlines()):
            try:
                calls = [node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call)]
            except SyntaxError:
                continue
            found += [(patch.slug, ast.unparse(call.func), call) for call in calls
                      if ast.unparse(call.func).startswith(("megatron_ext.", "hooks."))]  # fmt: skip
    return found


def test_vllm_ascend7823_verl6648_hooks_meet_a_function_with_that_signature():
    """A run-time hook hooked nothing and success was reported."""
    calls = hook_calls()
    assert calls, "no patch calls megatron_ext any more: is the series empty?"
    for slug, name, call in calls:
        module, _, function = name.rpartition(".")
        module = "megatron_ext.runtime.hooks" if module == "hooks" else module
        target = getattr(importlib.import_module(module), function, None)
        assert callable(target), f"{slug} calls {name}, which does not exist"
        inspect.signature(target).bind(*call.args, **{word.arg: word.value for word in call.keywords})


@pytest.mark.timeout(1800)
def test_every_proof_is_red_without_its_patch_and_green_with_the_series(monkeypatch):
    lab = Lab(Path(REPOSITORY), Path(REPOSITORY))
    said = lab.run("prove", "--whole", "--json")
    assert said.code == 0, said.err
    assert {one["state"] for one in said.data["proofs"]} == {"needed"}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_proof_is_green_with_its_dependencies_alone():
    said = Lab(Path(REPOSITORY), Path(REPOSITORY)).run("prove", "--json")
    assert said.code == 0, said.err
