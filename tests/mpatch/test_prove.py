from __future__ import annotations

import pytest

TESTS = """
import os
import pathlib

import pytest
from fake.core.loss import loss
from fake.core.router import TopKRouter


def test_empty_mean_is_no_crash():
    assert loss([]) == 0


def test_always_green():
    assert True


def test_always_red():
    assert False


@pytest.mark.parametrize("tokens", [[2, 1], [1, 2]])
def test_tokens_come_sorted(tokens):
    assert TopKRouter(1).forward(tokens) == 3
    text = pathlib.Path(os.environ["MPATCH_TREE"], "fake/core/router.py").read_text()
    assert "sorted(tokens)" in text


def test_skipped():
    pytest.skip("no GPU")
"""


@pytest.fixture
def proven(three):
    (three.root / "tests").mkdir()
    (three.root / "tests/test_fake.py").write_text(TESTS)
    return three


def with_proof(lab, slug, name, more=""):
    text = lab.good("show", slug, "--message").out
    path = lab.root / "m.txt"
    path.write_text(text.replace("tests/test_x.py::test_x", f"tests/test_fake.py{name}{more}"))
    lab.good("refresh", slug, "--message", str(path))


def prove(lab, *words):
    import sys

    return lab.run("prove", *words, "--python", sys.executable)


def test_needed_absorbed_broken_and_wrong_reason(proven):
    with_proof(proven, "guard", "::test_empty_mean_is_no_crash", "\nProof-Fails-With: ZeroDivisionError")
    with_proof(proven, "top-k-more", "::test_tokens_come_sorted")
    good = prove(proven, "guard", "top-k-more", "--json")
    assert good.code == 0, good
    states = {one["slug"]: one["state"] for one in good.data["proofs"]}
    assert states == {"core/guard": "needed", "core/top-k-more": "needed"}
    assert "ZeroDivisionError" in good.data["proofs"][0]["detail"]
    assert prove(proven, "guard", "top-k-more", "--whole").code == 0

    with_proof(proven, "top-k", "::test_always_green")
    bad = prove(proven, "top-k")
    assert bad.code == 1
    assert "ProofFailed" in bad.err
    assert "absorbed: core/top-k" in bad.err


def test_red_with_the_patch_and_red_for_another_reason(proven):
    with_proof(proven, "top-k", "::test_always_red")
    with_proof(proven, "guard", "::test_empty_mean_is_no_crash", "\nProof-Fails-With: KeyError")
    bad = prove(proven, "guard", "top-k")
    assert bad.code == 1
    assert "broken: core/top-k" in bad.err
    assert "wrong reason: core/guard: expected 'KeyError'" in bad.err


def test_proof_that_does_not_run_is_no_verdict(proven):
    with_proof(proven, "guard", "::test_skipped")
    assert prove(proven, "guard").code == 2
    assert prove(proven, "top-k").code == 2  # its test file does not exist
    assert not list((proven.root / "build/mpatch/proofs").iterdir())


def test_a_hunk_that_the_proof_does_not_miss_is_named(proven):
    with_proof(proven, "guard", "::test_empty_mean_is_no_crash")
    assert "not missed" not in prove(proven, "guard", "--hunks").out  # one hunk: that is the proof itself
    proven.good("edit", "guard")
    proven.replace("fake/train.py", "    done = 0", "    done = 0  # steps")
    proven.good("refresh")
    assert "not missed" not in prove(proven, "guard").out
    said = prove(proven, "guard", "--hunks")
    assert said.code == 0, said
    assert "not missed   core/guard: the proof is green without fake/train.py:1 in train" in said.out
    assert "fake/core/loss.py" not in said.out
