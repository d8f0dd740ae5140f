from __future__ import annotations

import pytest
from lab import release


@pytest.fixture
def moving(three):
    for name in ("clean", "moved", "absorbed"):
        three.add_base(name, release(name))
    return three


def onto(lab, name, *more):
    return lab.run("rebase", "--onto", name, "--offline", str(lab.shelf), *more)


def test_clean_release_keeps_patch_bytes_and_moves_the_default(moving):
    before = {slug: moving.patch(slug) for slug in ("core/guard", "core/top-k", "core/top-k-more")}
    said = onto(moving, "clean")
    assert said.code == 0, said
    assert "range diff" in said.out
    assert {slug: moving.patch(slug) for slug in before} == before
    assert 'default_base = "clean"' in (moving.root / "upstream.toml").read_text()
    assert moving.good("verify").code == 0


def test_moved_release_changes_line_numbers_only_and_the_function_stays(moving):
    assert onto(moving, "moved").code == 0
    patch = moving.patch("core/top-k")
    assert b"TopKRouter.forward" in patch
    text = (moving.tree / "fake/core/router.py").read_text()
    assert text.index("sorted(tokens)") > text.index("class TopKRouter")
    assert moving.good("verify").code == 0
    assert "already applied" in moving.good("apply").out


def test_absorbed_patch_is_reported_and_never_dropped_silently(moving):
    before = moving.snapshot("patches")
    said = onto(moving, "absorbed")
    assert said.code == 1
    assert "PatchAbsorbed" in said.err
    assert "core/guard" in said.err
    assert moving.snapshot("patches") == before
    assert moving.run("status").code == 1
    again = moving.run("rebase", "--continue")
    assert "PatchAbsorbed" in again.err
    said = moving.good("rebase", "--continue", "--drop-absorbed")
    assert "absorbed, dropped: core/guard" in said.out
    assert [row["slug"] for row in moving.good("list", "--json").data["patches"]] == ["core/top-k", "core/top-k-more"]
    assert moving.good("verify").code == 0


def conflicting():
    files = release("clean")
    files["fake/core/loss.py"] = "def loss(values):\n    # mean of all\n    return sum(values) / (len(values) + 0)\n"
    return files


def test_conflict_waits_refuses_markers_continues(moving):
    moving.add_base("2.0", conflicting())
    said = onto(moving, "2.0")
    assert said.code == 1
    assert "MoveConflict" in said.err
    assert "build/megatron/fake/core/loss.py" in said.err
    assert "EditOpen" in moving.run("apply").err
    assert "EditOpen" in moving.run("edit", "guard").err
    assert "MoveConflict" in moving.run("rebase", "--continue").err
    (moving.tree / "fake/core/loss.py").write_text(
        "def loss(values):\n    # mean of all\n    return sum(values) / max(len(values), 1)\n"
    )
    assert "how" in moving.good("rebase", "--continue", "--json").data
    assert moving.good("verify").code == 0
    assert b"max(len(values), 1)" in moving.patch("core/guard")


def test_abort_leaves_everything_as_before(moving):
    moving.add_base("2.0", conflicting())
    patches, tree = moving.snapshot("patches"), (moving.tree / "fake/core/loss.py").read_text()
    assert onto(moving, "2.0").code == 1
    moving.good("rebase", "--abort")
    assert moving.snapshot("patches") == patches
    assert (moving.tree / "fake/core/loss.py").read_text() == tree
    assert moving.good("verify").code == 0
    assert "NoEditOpen" in moving.run("rebase", "--abort").err


def test_hunk_in_another_function_stops_until_a_person_agrees(moving):
    """The class was renamed upstream: the lines fit, but the place has another name."""
    files = release("clean")
    files["fake/core/router.py"] = files["fake/core/router.py"].replace("class TopKRouter", "class BestRouter")
    moving.add_base("2.0", files)
    said = onto(moving, "2.0")
    assert said.code == 1
    assert "WrongPlace" in said.err
    assert "was router.py: TopKRouter.forward" in said.err
    assert "now router.py: BestRouter.forward" in said.err
    moving.run("rebase", "--continue")  # the first patch agreed to; the second was recorded at the old name, too
    moving.good("rebase", "--continue")
    assert b"BestRouter.forward" in moving.patch("core/top-k")
    assert moving.good("verify").code == 0


def test_refresh_that_hurts_a_later_patch_waits_and_abort_keeps_the_edit(three):
    three.good("edit", "core/top-k")
    three.replace("fake/core/router.py", "tokens = list(tokens)", "tokens = tuple(tokens)")
    said = three.run("refresh")
    assert said.code == 1
    assert "MoveConflict" in said.err
    assert "core/top-k-more" in said.err
    three.good("rebase", "--abort")
    assert "tuple(tokens)" in (three.tree / "fake/core/router.py").read_text()
    assert three.run("status", "--json").data["mode"] == "edit"
    assert three.run("refresh").code == 1
    path = three.tree / "fake/core/router.py"
    import re

    path.write_text(
        re.sub(r"<<<<<<< .*?>>>>>>> [^\n]*\n", "        tokens = sorted(tokens)\n", path.read_text(), flags=re.S)
    )
    three.good("rebase", "--continue")
    assert three.good("verify").code == 0
    assert b"tuple(tokens)" in three.patch("core/top-k")
