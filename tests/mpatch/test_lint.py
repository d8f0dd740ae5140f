"""Each rule with a passing and a failing fixture."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tools.mpatch import lint
from tools.mpatch.check import closure
from tools.mpatch.checkout import Checkout
from tools.mpatch.patchfile import render
from tools.mpatch.series import Series, load_series
from tools.mpatch.stack import build


@pytest.fixture
def context(three) -> lint.Context:
    """A series on which every rule is content."""
    (three.root / "tests").mkdir()
    (three.root / "tests/test_x.py").write_text("def test_x():\n    pass\n")
    checkout = Checkout(three.root)
    series, store = load_series(checkout), checkout.store()
    base = checkout.pins().base()
    return lint.context_of(checkout, series, build(store, base.tree, series.patches), store, base.name)


def changed(context, **parts):
    """Return the context with another first patch."""
    first = dataclasses.replace(context.series.patches[0], **parts)
    patches = (first, *context.series.patches[1:])
    return dataclasses.replace(context, series=Series(patches, tuple(map(render, patches))))


def said(context, **parts):
    return changed(context, message=dataclasses.replace(context.series.patches[0].message, **parts))


def trailer(context, key, value):
    trailers = context.series.patches[0].message.trailers
    return said(context, trailers=tuple((name, value if name == key else old) for name, old in trailers))


def hunk(context, **parts):
    change = context.series.patches[0].changes[0]
    hunks = (dataclasses.replace(change.hunks[0], **parts),)
    return changed(context, changes=(dataclasses.replace(change, hunks=hunks),))


def budget(context, **parts):
    return dataclasses.replace(context, budget=dataclasses.replace(context.budget, **parts))


def ambiguous(context):
    """A change of TopKRouter.forward with one line of context, which Router.forward has, too."""
    change = context.series.patches[1].changes[0]
    lines = (
        b"         scores = self.score(tokens)\n",
        b"+        scores = scores\n",
        b"         total = sum(scores)\n",
    )
    old = context.store.blob(change.old_id).split(b"\n")
    at = max(number for number, line in enumerate(old, 1) if line == lines[0][1:-1])
    bad = dataclasses.replace(change.hunks[0], old_start=at, old_count=2, new_start=at, new_count=3, lines=lines)
    first = dataclasses.replace(context.series.patches[1], changes=(dataclasses.replace(change, hunks=(bad,)),))
    return dataclasses.replace(context, series=Series((first,), (b"",)))


def stale_readme(context):
    (context.patches_folder / "README.md").write_text("old")
    return context


FAILING = {
    "TrailersComplete": [
        lambda c: said(c, trailers=()),
        lambda c: trailer(c, "Reason", " "),
        lambda c: said(c, trailers=(*c.series.patches[0].message.trailers, ("Typo", "x"))),
    ],
    "UpstreamStatusKnown": [
        lambda c: trailer(c, "Upstream-Status", "Sent"),
        lambda c: trailer(c, "Upstream-Status", "Submitted"),
    ],
    "ScopeFits": [lambda c: trailer(c, "Scope", "all"), lambda c: trailer(c, "Scope", "git")],
    "DependsOnEarlier": [
        lambda c: trailer(c, "Depends-On", "core/top-k"),
        lambda c: trailer(c, "Depends-On", "no/such"),
    ],
    "ProofExists": [
        lambda c: trailer(c, "Proof", "by eye"),
        lambda c: trailer(c, "Proof", "tests/test_x.py::test_none"),
        lambda c: trailer(c, "Proof", "tests/test_none.py"),
    ],
    "SignedOff": [lambda c: trailer(c, "Signed-off-by", "me"), lambda c: trailer(c, "Signed-off-by", "Name <address>")],
    "SubjectReads": [
        lambda c: said(c, subject="X" * 76),
        lambda c: said(c, subject="Ends."),
        lambda c: said(c, subject="low"),
    ],
    "Canonical": [
        lambda c: dataclasses.replace(
            c, series=Series(c.series.patches, (c.series.data[0] + b"\n", *c.series.data[1:]))
        )
    ],
    "ContextUnique": [ambiguous],
    "PlaceRecorded": [lambda c: hunk(c, place="other.place")],
    "AddedLinesClean": [
        lambda c: hunk(c, lines=(b"+x = 1 \n",)),
        lambda c: hunk(c, lines=(b"+\tx\n",)),
        lambda c: hunk(c, lines=(b"+<<<<<<< ours\n",)),
    ],
    "ThinEnough": [lambda c: budget(c, added_lines_per_patch=0)],
    "WithinBudget": [
        lambda c: budget(c, patches=2),
        lambda c: budget(c, added_lines=1),
        lambda c: budget(c, hunks=0),
        lambda c: budget(c, hot_files={"fake/core/router.py": 1}),
    ],
    "ReadmeFresh": [stale_readme],
}


def findings(rule, context):
    return list(next(one for one in lint.RULES if type(one).__name__ == rule).find(context))


def test_every_rule_has_a_failing_fixture():
    assert set(FAILING) == {type(rule).__name__ for rule in lint.RULES}
    assert all(type(rule).__doc__ for rule in lint.RULES)


@pytest.mark.parametrize("rule", FAILING)
def test_rule_passes_and_fails(rule, context):
    assert findings(rule, context) == []
    for failing in FAILING[rule]:
        assert findings(rule, failing(context)), failing


def test_check_lists_findings_of_all_rules(context, three):
    assert three.good("check").code == 0
    (Path(context.root) / "tests/test_x.py").unlink()
    (three.root / "patches/README.md").write_text("old")
    refused = three.run("check", "--json")
    assert refused.code == 1
    assert refused.data["why"].count("ProofExists") == 3
    assert "ReadmeFresh" in refused.data["why"]


def test_check_of_nothing_is_no_success(lab):
    lab.apply()
    assert lab.run("check").code == 2
    assert lab.run("prove").code == 2
    assert lab.run("drift", "1.0").code == 2
    assert lab.run("check", "no-such-gate").code == 64


def test_alone_finds_a_missing_dependency(three):
    said = three.good("show", "top-k-more", "--message").out
    path = three.root / "m.txt"
    path.write_text(said.replace("Depends-On: core/top-k", "Depends-On: none"))
    three.good("refresh", "top-k-more", "--message", str(path))
    refused = three.run("check", "alone")
    assert refused.code == 1
    assert "core/top-k-more: does not fit with its Depends-On alone; with core/top-k it fits" in refused.err


def test_alone_notes_a_dependency_by_meaning_only(three):
    three.add_patch("core/train", "fake/train.py", "done = 0", "done = 0  # steps", needs="core/guard")
    assert "core/train: fits without core/guard: a dependency by meaning only" in three.good("check", "alone").out
    assert closure(load_series(Checkout(three.root)), "core/train") == {"core/guard"}


def test_prefixes_compile(three):
    three.add_patch("core/train", "fake/train.py", "done = 0", "done = = 0")
    refused = three.run("check", "prefixes")
    assert "core/train: fake/train.py:2: invalid syntax" in refused.err


def test_budget_is_shown_by_list(three):
    pins = three.root / "upstream.toml"
    pins.write_text(pins.read_text() + '\n[budget]\npatches = 2\n[budget.hot_files]\n"fake/core/router.py" = 9\n')
    lines = three.good("list").out
    assert "budget: patches 3 of 2  EXCEEDED" in lines
    assert "budget: hunks in fake/core/router.py 2 of 9" in lines
