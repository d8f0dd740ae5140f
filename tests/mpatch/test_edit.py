from __future__ import annotations

from lab import plain_git


def test_edit_refresh_rewrites_the_patch_and_those_after_it(three):
    three.good("edit", "core/top-k")
    assert "sorted" not in (three.tree / "fake/core/router.py").read_text()
    three.replace("fake/core/router.py", "self.bias = 0.0", "self.bias = 0")
    said = three.good("refresh")
    assert "wrote patches/core/top-k.patch" in said.out
    assert "wrote patches/core/top-k-more.patch" in said.out
    assert "wrote patches/core/guard.patch" not in said.out
    assert three.good("verify").code == 0


def test_edits_on_top_go_down_to_the_named_patch(three):
    three.replace("fake/core/loss.py", "    # mean", "    # the mean")
    said = three.run("refresh")
    assert "NoEditOpen" in said.err
    three.good("refresh", "guard")
    assert b"+    # the mean" in three.patch("core/guard")
    assert three.good("status").code == 0


def test_new_keeps_edits_made_before(three):
    three.replace("fake/train.py", "done = 0", "done = 0  # steps")
    three.good("new", "train/comment", "--message", str(three.message("Say what done counts")))
    three.good("refresh")
    assert b"+    done = 0  # steps" in three.patch("train/comment")


def test_new_after_an_earlier_patch_works_at_that_place(three):
    """ungoogled-chromium-windows#43: a patch made alone fails in the series."""
    three.good("new", "core/between", "--after", "top-k", "--message", str(three.message("Count tokens")))
    assert "list(tokens)" in (three.tree / "fake/core/router.py").read_text()
    three.replace("fake/core/router.py", "tokens = list(tokens)", "tokens = list(tokens)\n        count = len(tokens)")
    three.run("refresh")
    slugs = [row["slug"] for row in three.good("list", "--json").data["patches"]]
    if "core/between" not in slugs:  # the patch behind it changes the line above: a person decides
        path = three.tree / "fake/core/router.py"
        text = path.read_text()
        start, end = text.index("<<<<<<<"), text.index("\n", text.index(">>>>>>>")) + 1
        path.write_text(
            text[:start].rstrip(" ") + "        tokens = sorted(tokens)\n        count = len(tokens)\n" + text[end:]
        )
        three.good("rebase", "--continue")
        slugs = [row["slug"] for row in three.good("list", "--json").data["patches"]]
    assert slugs == ["core/guard", "core/top-k", "core/between", "core/top-k-more"]
    assert three.good("verify").code == 0


def test_drop_takes_the_patch_out_and_refuses_while_another_needs_it(three):
    said = three.run("drop", "core/top-k", "--because", "x")
    assert "SeriesWrong" in said.err
    assert "core/top-k-more" in said.err
    three.good("drop", "core/top-k-more", "--because", "x")
    three.good("drop", "core/top-k", "--because", "x")
    assert three.good("verify", "--json").data["patches"] == ["core/guard"]


def test_new_and_deleted_files_and_no_line_end_travel(three):
    three.good("new", "core/files", "--message", str(three.message("Files")))
    (three.tree / "fake/extra.py").write_bytes(b"a = 1\nb = 2")
    (three.tree / "fake/run.sh").write_bytes(b"#!/bin/sh\n")
    (three.tree / "fake/run.sh").chmod(0o755)
    (three.tree / "fake/version.py").unlink()
    three.good("refresh")
    assert three.good("verify").code == 0
    assert (three.tree / "fake/extra.py").read_bytes() == b"a = 1\nb = 2"
    assert (three.tree / "fake/run.sh").stat().st_mode & 0o100
    assert not (three.tree / "fake/version.py").exists()
    assert plain_git(three.tree, "status", "--porcelain") == ""


def test_message_only_refresh(three):
    text = three.good("show", "guard", "--message").out
    path = three.root / "m.txt"
    path.write_text(text.replace("Change core/guard", "Guard the empty mean"))
    three.good("refresh", "guard", "--message", str(path))
    assert b"Subject: [PATCH] Guard the empty mean\n" in three.patch("core/guard")
    assert three.good("status").code == 0


def hand_edit(lab, slug, old, new):
    path = lab.root / "patches" / f"{slug}.patch"
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new, 1))


def test_hand_edited_patch_is_taken_over_on_request(three):
    hand_edit(three, "core/top-k", b"+        tokens = list(tokens)", b"+        tokens = list(tokens)  # all")
    assert "PostimageMismatch" in three.run("apply").err
    said = three.run("refresh", "core/top-k", "--from-file")
    assert "MoveConflict" in said.err  # the next patch changes that very line
    three.good("rebase", "--abort")
    hand_edit(three, "core/top-k", b"list(tokens)  # all", b"list(tokens)")
    three.good("apply")
    hand_edit(three, "core/guard", b", 1)", b", 2)")
    three.good("refresh", "guard", "--from-file")
    assert b", 2)" in three.patch("core/guard")
    assert three.good("verify").code == 0


def test_stripped_context_lines_are_mended_on_request(three):
    three.add_patch("core/data", "fake/core/data.py", "    return 3\n\n", "    return 33\n\n")
    before = three.patch("core/data")
    hand_edit(three, "core/data", b"\n \n", b"\n\n")
    assert "PatchContextStripped" in three.run("apply").err
    three.good("refresh", "core/data", "--from-file")
    assert three.patch("core/data") == before


def test_patch_in_another_form_is_written_anew(three):
    before = three.patch("core/guard")
    hand_edit(three, "core/guard", b"@@ loss", b"@@ def loss(values):")
    assert three.good("apply").code == 0
    assert "PlaceRecorded" in three.run("check", "lint").err
    three.good("refresh", "guard", "--from-file")
    assert three.patch("core/guard") == before
