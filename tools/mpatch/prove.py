"""prove: every patch's Proof is red without it and green with it. A proof that is green without is `absorbed`.

The proof runs on the base plus the patch's Depends-On, in a tree of its own. It finds that tree as `import megatron`
(PYTHONPATH puts it before everything else) and as a path in MPATCH_TREE. Proofs that need the same tree share one
pytest process, since importing torch costs seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tools.mpatch import check, sources
from tools.mpatch.apply import working
from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import CouldNotCheck, NothingChecked, ProofFailed
from tools.mpatch.hunks import Without, each_without
from tools.mpatch.output import Answer
from tools.mpatch.patchfile import Patch
from tools.mpatch.plan import items_of
from tools.mpatch.series import load_series
from tools.mpatch.stack import build
from tools.mpatch.store import Store
from tools.mpatch.tree import write_tree
from tools.mpatch.worktree import carry_compiled

TREE_VARIABLE = "MPATCH_TREE"
NEEDED, ABSORBED, BROKEN, UNCHECKED, WRONG_REASON = "needed", "absorbed", "broken", "unchecked", "wrong reason"
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True)
class Outcome:
    """How one test ended in one tree; `text` is the failure as pytest shows it."""

    state: str
    text: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the two runs say about a patch."""

    slug: str
    proof: str
    state: str
    detail: str


def judge(slug: str, proof: str, without: Outcome, with_: Outcome, expected: str) -> Verdict:
    """Return the verdict from the two outcomes.

    >>> judge("a/b", "t", Outcome("failed", "KeyError: x"), Outcome("passed"), "KeyError").state
    'needed'
    >>> judge("a/b", "t", Outcome("passed"), Outcome("passed"), "").state
    'absorbed'
    >>> judge("a/b", "t", Outcome("failed", "ImportError"), Outcome("passed"), "KeyError").state
    'wrong reason'
    """
    if with_.state not in (PASSED, FAILED) or without.state not in (PASSED, FAILED):
        return Verdict(slug, proof, UNCHECKED, _unrun(without, with_))
    if with_.state == FAILED:
        return Verdict(slug, proof, BROKEN, f"red with the patch: {last_line(with_.text)}")
    if without.state == PASSED:
        return Verdict(slug, proof, ABSORBED, "green without the patch: upstream has it, or the proof proves nothing")
    if expected not in without.text:
        return Verdict(slug, proof, WRONG_REASON, f"expected {expected!r}, was {last_line(without.text)!r}")
    return Verdict(slug, proof, NEEDED, f"red without: {last_line(without.text)}")


def stated(patch: Patch, outcome: Outcome) -> bool:
    """Return whether a failure shows what the patch's Proof-Fails-With names; without one every failure does."""
    return patch.message.trailer("Proof-Fails-With") in outcome.text


def _unrun(without: Outcome, with_: Outcome) -> str:
    text = without.text if without.state not in (PASSED, FAILED) else with_.text
    return f"without: {without.state}, with: {with_.state}: {text.strip()}"


def last_line(text: str) -> str:
    r"""Return the line that says why: pytest's first `E` line.

    >>> last_line("x = 1\nE   KeyError: 'x'\nE   more")
    "KeyError: 'x'"
    """
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E  ")]
    return lines[0] if lines else text.strip().split("\n")[-1]


def prove(
    checkout: Checkout,
    slugs: Sequence[str] = (),
    *,
    whole: bool = False,
    hunks: bool = False,
    python: str = "",
    timeout_s: int = 600,
) -> Answer:
    """Run the proofs of the series, or of some patches.

    Args:
        slugs: Only these.
        whole: Take the whole series for the tree with the patch: one process for all, so much faster, but a
            missing Depends-On goes unseen.
        hunks: Run each proof also without each one hunk of its patch, on top of the patches below: a proof that is
            green then does not miss that hunk, and says so in the answer.
        python: The interpreter that runs the tests.
        timeout_s: Seconds for each test.

    Raises:
        NothingChecked: there is none.
        ProofFailed: a patch is absorbed, broken, or its proof fails for another reason than stated.
        CouldNotCheck: a proof did not run.
    """
    with working(checkout, "prove"):
        series, store, base = load_series(checkout), checkout.store(), checkout.pins().base()
        fetched = sources.fetch(checkout, base)
        subject = check.Subject(checkout, series, build(store, fetched.tree, series.patches), store, base.name)
        chosen = [series.patches[series.index(slug)] for slug in slugs] if slugs else list(series.patches)
        if not chosen:
            raise NothingChecked("the series is empty: zero proofs were run", where="patches/series")
        items = {item.slug: item for item in items_of(series, subject.stack)}
        proofs = {patch.slug: patch.message.trailer("Proof").strip() for patch in chosen}
        trees: dict[str, list[str]] = {}
        pairs: dict[str, tuple[str, str]] = {}
        for patch in chosen:
            needs = check.closure(series, patch.slug)
            # The last of the needs on top of the others is the tree without; no needs: the base itself.
            order = [slug for slug in items if slug in needs]
            without = check.alone(subject, items, needs, order[-1]) if order else fetched.tree
            with_ = subject.stack.tree if whole else check.alone(subject, items, needs, patch.slug)
            if without is None or with_ is None:
                raise ProofFailed(f"{patch.slug} does not fit with its Depends-On alone", remedy="mpatch check alone")
            pairs[patch.slug] = (without, with_)
            for tree in (without, with_):
                trees.setdefault(tree, []).append(proofs[patch.slug])
        left_out = [one for patch in chosen if hunks
                    for one in each_without(store, patch, items[patch.slug].before)]  # fmt: skip
        for one in left_out:
            trees.setdefault(one.tree, []).append(proofs[one.slug])
        outcomes = {tree: run_tests(checkout, store, tree, tests, python, timeout_s) for tree, tests in trees.items()}
    verdicts = []
    for patch in chosen:
        proof = proofs[patch.slug]
        without_tree, with_tree = pairs[patch.slug]
        verdicts.append(judge(patch.slug, proof, outcomes[without_tree][proof], outcomes[with_tree][proof],
                              patch.message.trailer("Proof-Fails-With")))  # fmt: skip
    missed = [one for one in left_out if outcomes[one.tree][proofs[one.slug]].state == PASSED]
    return answer(verdicts, missed)


def answer(verdicts: list[Verdict], missed: Sequence[Without] = ()) -> Answer:
    """Return the verdicts as an answer, or raise when one is not `needed`."""
    lines = [f"{one.state:<12} {one.slug}: {one.detail}" for one in verdicts]
    lines += [f"{'not missed':<12} {one.slug}: the proof is green without {one.where}" for one in missed]
    bad = [one for one in verdicts if one.state in (ABSORBED, BROKEN, WRONG_REASON)]
    if bad:
        raise ProofFailed(
            f"{len(bad)} of {len(verdicts)} proofs do not prove their patch",
            why="\n".join(f"{one.state}: {one.slug}: {one.detail}\n  {one.proof}" for one in bad),
            remedy="absorbed: mpatch drop SLUG --because TEXT; else mend the proof or the patch",
        )
    if any(one.state == UNCHECKED for one in verdicts):
        raise CouldNotCheck("not all proofs ran", why="\n".join(lines), remedy="run the test by hand, with --python")
    return Answer(lines, {"proofs": [one.__dict__ for one in verdicts], "not_missed": [asdict(one) for one in missed]})


def run_tests(
    checkout: Checkout, store: Store, tree: str, tests: list[str], python: str, timeout_s: int
) -> dict[str, Outcome]:
    """Lay a tree out beside the real one and run some tests against it, in one process."""
    folder = checkout.own / "proofs" / tree[:12]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        write_tree(store, folder, store.commit(tree, "A tree for proofs\n", None), tree)
        if checkout.place.exists():
            carry_compiled(checkout.place, folder)  # the dataset helper, where its source is the same
        report = folder / ".git" / "report.xml"
        run = partial(_pytest, checkout.root, folder, report, python=python or _python(checkout), timeout_s=timeout_s)
        found = run(sorted(set(tests)))
        # One proof that cannot even be imported there keeps pytest from running any: ask each by itself.
        alone = [test for test, outcome in found.items() if outcome.state == NOT_RUN] if len(found) > 1 else []
        return found | {test: run([test])[test] for test in alone}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _python(checkout: Checkout) -> str:
    own = checkout.root / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def _pytest(
    root: Path, tree: Path, report: Path, tests: list[str], *, python: str, timeout_s: int
) -> dict[str, Outcome]:
    report.unlink(missing_ok=True)
    path = os.pathsep.join([str(tree), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, TREE_VARIABLE: str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        "-o",
        "junit_family=xunit1",
    ]
    # A gate or a device marker in the configuration must not hide a proof.
    try:
        done = subprocess.run([*command, *tests], cwd=root, env=env, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, check=False, timeout=timeout_s * len(tests))  # fmt: skip
    except subprocess.TimeoutExpired:
        return dict.fromkeys(tests, Outcome("timed out", f"after {timeout_s * len(tests)} s"))
    found = read_report(report.read_text()) if report.is_file() else {}
    ended = f"pytest ended with {done.returncode}; its last lines: {(done.stdout + done.stderr).strip()[-300:]}"
    return {test: together(test, found, ended) for test in tests}


def together(test: str, found: dict[str, Outcome], ended: str) -> Outcome:
    """Return the outcome of a test with all its parameters, or of a file: failed when one failed, passed when all did.

    >>> together("t.py::a", {"t.py::a[1]": Outcome("passed"), "t.py::a[2]": Outcome("failed", "x")}, "")
    Outcome(state='failed', text='x')
    >>> together("t.py", {"t.py::a": Outcome("passed"), "t.py::needs_gpu": Outcome("skipped")}, "")
    Outcome(state='passed', text='')
    """
    begins = (f"{test}[", f"{test}::")
    cases = [outcome for name, outcome in found.items() if name == test or name.startswith(begins)]
    order = (FAILED, "error", PASSED, "skipped")
    return min(cases, key=lambda one: order.index(one.state), default=Outcome(NOT_RUN, ended))


def read_report(xml: str) -> dict[str, Outcome]:
    """Return the outcome of every test of a JUnit report, by test id.

    >>> read_report('<testsuites><testsuite><testcase file="tests/t.py" classname="tests.t" name="test_a"/>'
    ...             '</testsuite></testsuites>')
    {'tests/t.py::test_a': Outcome(state='passed', text='')}
    """
    import xml.etree.ElementTree as ElementTree

    found = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        file, module = case.get("file", ""), case.get("classname", "")
        dotted = file.removesuffix(".py").replace("/", ".")
        inner = module[len(dotted) :].strip(".").split(".") if module.startswith(dotted) else []
        test = "::".join([file, *filter(None, inner), case.get("name", "")])
        state, text = PASSED, ""
        for kind, word in (("failure", FAILED), ("error", "error"), ("skipped", "skipped")):
            part = case.find(kind)
            if part is not None:
                state, text = word, f"{part.get('message', '')}\n{part.text or ''}"
        found[test] = Outcome(state, text)
    return found
