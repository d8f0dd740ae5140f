"""Random series: exported, applied, exported again, the same bytes; moved, the same change in the same function."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab import make_lab, release, sdist

from tools.mpatch import message
from tools.mpatch.patchfile import FileChange, apply_change, blob_id, split
from tools.mpatch.patchread import parse
from tools.mpatch.store import Store
from tools.mpatch.textdiff import hunks_between, occurrences

NORMAL, NIGHTLY = 20, 200
# Few different lines: like lines, and so ambiguous contexts, are what breaks patch tools.
LINES = st.sampled_from(
    ["x = 1", "y = 2", "", "    return x", "def f():", "class A:", "    def f(self):", "        pass", "#"]
)
RAW = st.lists(st.sampled_from([b"a\n", b"b\n", b"\n", b"c\x0cd\r\n", b" \n", "ü\u2028\n".encode()]), max_size=30)
RELAXED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def counts(test):
    """Run a property with few examples always, with many in the nightly set."""

    @pytest.mark.parametrize("count", [NORMAL, pytest.param(NIGHTLY, marks=pytest.mark.nightly)])
    def run(count):
        settings(max_examples=count, deadline=None, suppress_health_check=RELAXED, derandomize=count == NORMAL)(test)()

    run.__name__ = test.__name__
    return run


@counts
@given(RAW, RAW, st.booleans(), st.booleans())
def test_any_change_of_a_file_is_found_and_applied_exactly(before, after, cut_before, cut_after):
    old, new = b"".join(before), b"".join(after)
    old, new = old[: -1 if cut_before and old else None], new[: -1 if cut_after and new else None]
    with tempfile.TemporaryDirectory() as folder:
        hunks = hunks_between(Store.open(Path(folder) / "s"), "a.txt", old, new) if old != new else ()
    change = FileChange("a.txt", blob_id(old), blob_id(new), "100644", "100644", hunks)
    assert apply_change(change, old, "t") == new
    lines = split(old)
    for hunk in hunks:  # unique, or the whole file is the context
        assert occurrences(lines, hunk.old()) <= 1 or hunk.old() == lines or not lines


TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=40).map(str.strip)


@counts
@given(TEXT, st.lists(TEXT, max_size=4), TEXT.filter(lambda name: not re.search(r'[<>"(),@\\]', name)))
def test_any_message_that_is_accepted_comes_back_as_it_was(subject, body, author):
    text = subject + "\n\n" + "\n".join(body) + "\n\nScope: sdist\n"
    try:
        said = message.message(text, author=author or "x", email="a@b.example", date="Sun, 29 Nov 2026 17:45:05 +0000")
    except message.MessageWrong:
        return
    assert message.parse(message.render(said), "t") == said


@st.composite
def edits(draw, files):
    """Random edits of the release's Python files: (path, new text) a patch, one after the other."""
    current, series = dict(files), []
    names = [name for name in sorted(files) if name.endswith(".py") and "setup" not in name]
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(names))
        lines = current[path].split("\n")
        at = draw(st.integers(0, len(lines)))
        gone = draw(st.integers(0, min(2, len(lines) - at)))
        put = draw(st.lists(LINES, max_size=3))
        text = "\n".join(lines[:at] + put + lines[at + gone :])
        if text != current[path]:
            current[path] = text
            series.append((path, text))
    return series


def exported(lab, series):
    """Make the series through the tree; return the patches' bytes."""
    for number, (path, text) in enumerate(series):
        lab.good("new", f"random/p{number}", "--message", str(lab.message(f"Change {number}")))
        (lab.tree / path).write_text(text)
        lab.good("refresh")
    return {f"random/p{number}": lab.patch(f"random/p{number}") for number in range(len(series))}


@counts
@given(st.data())
def test_random_series_exports_applies_and_moves(data):
    series = data.draw(edits(release("1.0")))
    with tempfile.TemporaryDirectory() as folder:
        lab = make_lab(Path(folder))
        lab.apply()
        if not series:
            return
        patches = exported(lab, series)
        assert lab.good("check", "round-trip").code == 0  # exported again: the same bytes
        assert lab.good("verify").code == 0
        lab.add_base("moved", release("moved"))
        said = lab.run("rebase", "--onto", "moved", "--offline", str(lab.shelf))
        if said.code:  # an honest conflict: nothing was changed, and the way back works
            assert re.search(r"\[(MoveConflict|WrongPlace|PatchAbsorbed)\]", said.err), said
            assert {slug: lab.patch(slug) for slug in patches} == patches
            lab.good("rebase", "--abort")
        else:
            for slug, before in patches.items():
                assert changed(before) == changed(lab.patch(slug)), slug  # the same lines in the same function
        assert lab.good("verify").code == 0


def changed(data: bytes) -> list[tuple[str, set[str], bytes]]:
    return [(change.path, {hunk.place for hunk in change.hunks},
             b"".join(line for hunk in change.hunks for line in hunk.lines if line[:1] != b" "))
            for change in parse("a/b", data).changes]  # fmt: skip


def test_the_releases_differ():
    assert len({sdist(release(name), "1") for name in ("1.0", "clean", "moved", "absorbed")}) == 4
