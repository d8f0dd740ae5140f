"""release-notes: what changed between two states of the series, read from real commits and folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from lab import Lab, plain_git, release


@pytest.fixture
def tagged(three: Lab) -> Lab:
    """A checkout whose three patches are release 1 of the distribution."""
    number(three, 1)
    plain_git(three.root, "init", "-q")
    (three.root / ".gitignore").write_text("/build/\n")
    commit(three, "v1.0+moe.1")
    return three


def commit(lab: Lab, tag: str = "") -> None:
    plain_git(lab.root, "add", "-A")
    plain_git(lab.root, "commit", "-qm", "state")
    if tag:
        plain_git(lab.root, "tag", tag)


def number(lab: Lab, value: int) -> None:
    pins = lab.root / "upstream.toml"
    text = pins.read_text().partition("\n[distribution]")[0]
    pins.write_text(f"{text}\n[distribution]\nnumber = {value}\n")


def test_new_gone_and_changed_patches_are_told_apart(tagged: Lab) -> None:
    tagged.good("drop", "top-k-more", "--because", "a test")
    tagged.good("edit", "core/guard")
    tagged.replace("fake/core/loss.py", "max(len(values), 1)", "max(len(values), 2)")
    tagged.good("refresh")
    text = tagged.good("show", "core/guard", "--message").out.replace("Pending", "Submitted [fake#7]")
    (tagged.root / "message.txt").write_text(text)
    tagged.good("refresh", "core/guard", "--message", str(tagged.root / "message.txt"))
    (tagged.root / "message.txt").unlink()
    tagged.add_patch("core/more", "fake/train.py", "done += 1", "done += 2")
    number(tagged, 2)

    said = tagged.good("release-notes", "--json").data
    assert (said["since"], said["version"]) == ("1.0+moe.1", "1.0+moe.2")
    assert said["new"] == ["core/more"]
    assert said["gone"] == ["core/top-k-more"]
    assert said["changed"] == ["core/guard"]
    assert said["same"] == ["core/top-k"]
    assert said["pins"] == {"distribution.number": ["1", "2"]}

    page = tagged.good("release-notes").out
    assert "Since 1.0+moe.1 (v1.0+moe.1): on fake 1.0 (sdist), as before. 3 patches" in page
    changed = page.partition("### core/guard")[2].partition("## Pins")[0]
    assert "- Upstream-Status: Pending → Submitted [fake#7]" in changed
    assert "-+    return sum(values) / max(len(values), 1)" in changed
    assert "++    return sum(values) / max(len(values), 2)" in changed
    assert "Because it is a test." in page.partition("### core/more")[2]
    assert "It was to go: when a release has it" in page.partition("### core/top-k-more")[2]


def test_a_moved_base_and_its_pins_are_named(tagged: Lab) -> None:
    tagged.add_base("2.0", release("moved"))
    tagged.good("rebase", "--onto", "2.0", "--offline", str(tagged.shelf))
    commit(tagged)
    said = tagged.good("release-notes", "--json").data
    assert said["version"] == "2.0+moe.1"
    assert said["pins"]["default_base"] == ["1.0", "2.0"]
    assert "moved from fake 1.0 (sdist) to fake 2.0 (sdist)" in said["page"]
    # The digest is the one that the tree was recorded with.
    assert said["series_digest"] == json.loads((tagged.root / "build" / "pins.json").read_text())["series_digest"]


def test_states_are_revisions_or_folders_and_equal_ones_differ_in_nothing(tagged: Lab, tmp_path: Path) -> None:
    shutil.copytree(tagged.root / "patches", tmp_path / "old" / "patches")
    shutil.copy(tagged.root / "upstream.toml", tmp_path / "old")
    for since in ("v1.0+moe.1", "HEAD", str(tmp_path / "old")):
        said = tagged.good("release-notes", "--since", since, "--json").data
        assert (said["new"], said["gone"], said["changed"], said["pins"]) == ([], [], [], {})
        assert len(said["same"]) == 3
    target = tmp_path / "page.md"
    assert tagged.good("release-notes", "--to", "HEAD", "--since", "HEAD", "-o", str(target)).out == f"wrote {target}\n"
    assert "0 new, 0 gone, 0 changed, 3 the same" in target.read_text()


def test_the_first_release_has_only_new_patches(tagged: Lab) -> None:
    """Its own tag is not what a release is compared with."""
    said = tagged.good("release-notes", "--to", "v1.0+moe.1", "--json").data
    assert said["since"] == ""
    assert len(said["new"]) == 3
    assert said["page"].splitlines()[2].startswith("The first release: fake 1.0 (sdist) with 3 patches")


def test_a_state_that_cannot_be_read_is_not_an_empty_page(tagged: Lab, tmp_path: Path) -> None:
    for words in (("--since", "v9"), ("--since", str(tmp_path)), ("--to", "v9")):
        said = tagged.run("release-notes", *words)
        assert (said.code, said.out) == (2, "")
        assert "SnapshotUnreadable" in said.err
    said = tagged.run("release-notes", "--since", "HEAD", "-o", str(tagged.root / "upstream.toml" / "page.md"))
    assert (said.code, said.out) == (64, "")
    assert "the page cannot be written" in said.err
