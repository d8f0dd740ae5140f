"""What lies in the way: odd files, odd text, a disk that refuses, a copied checkout. Nothing is lost, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from lab import Lab, release


def parts(said):
    """Return what, where and try of a refusal: every one has them."""
    text = said.err
    assert text.startswith("error: "), said
    assert "\nwhere: " in text, said
    assert "\ntry:   " in text, said
    return text


def test_a_copied_checkout_finishes_its_own_change_and_not_the_first_ones(three, tmp_path):
    guard = three.patch("core/guard")
    plan = {"root": str(three.root), "files": {"patches/core/guard.patch": "new\n"}}  # an older mpatch wrote root, too
    three.root.joinpath("build/mpatch/journal.json").write_text(json.dumps(plan))
    other = Lab(tmp_path / "other", three.shelf)
    shutil.copytree(three.root, other.root, symlinks=True)
    other.run("status")
    assert (three.patch("core/guard"), other.patch("core/guard")) == (guard, b"new\n")


def test_what_a_kill_left_of_a_half_written_patch_is_removed(three):
    guard = three.root / "patches/core/guard.patch"
    plan = {"files": {"patches/core/guard.patch": guard.read_text()}}
    (three.root / "build/mpatch/journal.json").write_text(json.dumps(plan))
    torn = guard.with_name(".guard.patch.k1ll3d_x")  # as mkstemp names it
    torn.write_text("From 0000")
    three.good("status")
    assert not torn.exists()


def test_the_lock_of_a_git_that_was_killed_stops_nothing(three):
    store = three.root / "build/mpatch/store.git"
    for ref in (store / "refs/mpatch").rglob("*"):
        if ref.is_file():
            ref.with_name(f"{ref.name}.lock").touch()
    (store / "HEAD.lock").touch()
    shutil.rmtree(three.tree)
    three.add_base("clean", release("clean"))
    three.apply("--base", "clean")


@pytest.mark.parametrize("line", ["default_base = '1.0'  # ours", 'default_base="1.0"'])
def test_rebase_moves_the_default_however_it_is_written(three, line):
    pins = three.root / "upstream.toml"
    pins.write_text(pins.read_text().replace('default_base = "1.0"', line))
    three.add_base("clean", release("clean"))
    three.good("rebase", "--onto", "clean", "--offline", str(three.shelf))
    assert "base clean (default)" in three.good("status").out
    assert ("# ours" in pins.read_text()) == ("# ours" in line)


def test_rebase_that_cannot_move_the_default_changes_nothing(three):
    pins = three.root / "upstream.toml"
    pins.write_text(pins.read_text().replace('default_base = "1.0"', '"default_base" = "1.0"'))
    three.add_base("moved", release("moved"))
    before = three.snapshot("patches")
    said = three.run("rebase", "--onto", "moved", "--offline", str(three.shelf))
    assert said.code == 2
    assert 'default_base = "moved"' in parts(said)
    assert three.snapshot("patches") == before


@pytest.mark.parametrize("missing", ["all", "blobs"])
def test_damaged_store_names_the_way_out(three, missing):
    store = three.root / "build/mpatch/store.git"
    shutil.rmtree(store / "objects")
    if missing == "blobs":
        (store / "objects").mkdir()
    for verb in ("status", "apply", "verify"):
        said = three.run(verb)
        assert said.code == 2
        assert f"rm -r {store} build/megatron && mpatch apply" in parts(said)
    shutil.rmtree(store)
    shutil.rmtree(three.tree)
    three.apply()
    three.good("verify")


def test_saving_edits_overwrites_no_file(three):
    three.replace("fake/train.py", "done = 0", "done = 9")
    saved = three.root / "build/edits.diff"
    saved.write_text("saved before")
    said = three.run("apply", "--save", str(saved))
    assert said.code == 64
    assert "give --save another name" in parts(said)
    assert saved.read_text() == "saved before"
    assert "done = 9" in (three.tree / "fake/train.py").read_text()
    three.good("apply", "--save", str(saved.with_name("more.diff")))


def test_a_pipe_in_the_tree_hangs_nothing(three):
    os.mkfifo(three.tree / "fake/pipe")
    try:
        done = three.process("status", timeout=60)
    except subprocess.TimeoutExpired:
        pytest.fail("it waits for the pipe")
    assert done.returncode == 1
    assert f"rm {three.tree}/fake/pipe" in done.stderr


@pytest.mark.parametrize("name", [b"a\nb.py", b"\xff.py"])
def test_a_name_that_a_patch_cannot_carry(three, name):
    odd = os.fsencode(three.tree / "fake") + b"/" + name
    with open(odd, "w") as stream:
        stream.write("x = 1\n")
    said = three.run("refresh", "guard")
    assert said.code == 1
    assert "this name is not carried [PatchKindRefused]\nwhere: 'fake/" in parts(said)
    assert os.path.exists(odd)


def test_text_that_is_not_utf8(three):
    message = three.root / "m.txt"
    message.write_bytes(b"Subj\xe9kt\n")
    said = three.run("refresh", "guard", "--message", str(message))
    assert said.code == 64
    assert "the message is not UTF-8" in parts(said)
    series = three.root / "patches/series"
    series.write_bytes(series.read_bytes() + b"# \xe9\n")
    said = three.run("apply")
    assert said.code == 1
    assert "the series is not UTF-8 [SeriesWrong]" in parts(said)


def test_a_disk_that_refuses_is_said_and_looking_still_works(three):
    """DiskRefused: a folder in the place of the lock refuses as a read-only disk does, also to root."""
    lock = three.root / "build/mpatch/lock"
    lock.unlink()
    lock.mkdir()
    said = three.run("apply")
    assert said.code == 2
    assert "[DiskRefused]" in parts(said)
    assert str(lock) in said.err
    three.good("status")
