from __future__ import annotations

import json

from lab import plain_git


def test_empty_series_applies_but_verifies_nothing(lab):
    assert "applied (0 of 0)" in lab.apply().out
    assert "already applied (0 of 0)" in lab.good("apply").out
    said = lab.run("verify")
    assert said.code == 2
    assert "NothingChecked" in said.err


def test_second_apply_says_so_and_writes_nothing(three):
    before = three.snapshot()
    said = three.good("apply")
    assert "already applied (3 of 3)" in said.out
    assert three.snapshot() == before


def test_three_patches_apply_verify_and_show(three):
    assert three.good("verify").out.startswith("verified")
    assert "sorted(tokens)" in (three.tree / "fake/core/router.py").read_text()
    assert three.good("status").code == 0
    assert [row["slug"] for row in three.good("list", "--json").data["patches"]] == [
        "core/guard",
        "core/top-k",
        "core/top-k-more",
    ]


def test_pins_json_is_the_contract_of_the_architecture_page(three):
    pins = json.loads((three.root / "build" / "pins.json").read_text())
    assert pins["schema"] == 1
    assert pins["base"] == "1.0"
    assert pins["patches"] == ["core/guard", "core/top-k", "core/top-k-more"]
    assert pins["patched_tree"] == plain_git(three.tree, "rev-parse", "HEAD^{tree}").strip()
    assert len(pins["series_digest"]) == 64


def test_tree_has_a_commit_a_patch(three):
    subjects = plain_git(three.tree, "log", "--format=%s", "--reverse").split("\n")[:-1]
    assert subjects == [
        "The base, as pinned",
        "Change core/guard",
        "Change core/top-k",
        "Change core/top-k-more",
    ]
    assert plain_git(three.tree, "status", "--porcelain") == ""


def test_build_artefacts_are_no_foreign_edits_and_compiled_helpers_stay(three):
    helper = three.tree / "fake" / "core" / "helpers.cpython-312.so"
    helper.write_bytes(b"\x7fELF")
    (three.tree / "fake" / "__pycache__").mkdir()
    (three.tree / "fake" / "__pycache__" / "train.cpython-312.pyc").write_bytes(b"x")
    assert "already applied" in three.good("apply").out
    three.add_patch("core/train", "fake/train.py", "done = 0", "done = 0  # steps")
    assert helper.read_bytes() == b"\x7fELF"


def test_foreign_edits_are_refused_listed_saved_and_discarded(three):
    three.replace("fake/train.py", "done += 1", "done += 2")
    (three.tree / "note.txt").write_text("mine")
    before = three.snapshot("build/megatron")
    said = three.run("apply")
    assert said.code == 1
    assert "changed  fake/train.py" in said.err
    assert "added    note.txt" in said.err
    assert "--save" in said.err
    assert "--discard" in said.err
    assert three.snapshot("build/megatron") == before
    three.good("apply", "--save", str(three.root / "build" / "edits.diff"))
    saved = (three.root / "build" / "edits.diff").read_text()
    assert "+        done += 2" in saved
    assert "+mine" in saved
    assert "done += 1" in (three.tree / "fake/train.py").read_text()
    assert not (three.tree / "note.txt").exists()
    three.replace("fake/train.py", "done += 1", "done += 3")
    three.good("apply", "--discard")
    assert three.good("status").code == 0
