"""drift: how each patch would fare on another base. Looks only, goes on past failures; a scheduled job, no gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tools.mpatch import sources
from tools.mpatch.apply import working
from tools.mpatch.check import syntax_error
from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import MpatchError, NothingChecked
from tools.mpatch.git import require_version
from tools.mpatch.output import Answer
from tools.mpatch.patchfile import FileChange, Patch, blob_id, split
from tools.mpatch.plan import Item, items_of, places
from tools.mpatch.prove import FAILED, PASSED, Outcome, last_line, run_tests, stated
from tools.mpatch.rebase import MERGE_TREE
from tools.mpatch.series import load_series
from tools.mpatch.stack import build
from tools.mpatch.store import Entry, Store
from tools.mpatch.textdiff import changes_between

CLEAN, OFFSET, MERGED = "clean", "offset", "3way-clean"
CONFLICT, ABSORBED, MOVED, GONE, ELSEWHERE = "conflict", "absorbed", "file-moved", "file-gone", "wrong-place"
FITS = (CLEAN, OFFSET, MERGED)
PROOF_S = 600


@dataclass(frozen=True)
class Fate:
    """How one patch fares; `detail` says where."""

    slug: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """How the series fares on one base; `error` is why it could not be looked at."""

    base: str
    tree: str
    fates: tuple[Fate, ...]
    error: str = ""


def drift(
    checkout: Checkout, bases: Sequence[str], *, offline: Path | None = None, prove: bool = False, python: str = ""
) -> Answer:
    """Look at other bases: names of upstream.toml, clones as PATH or PATH@REVISION.

    Exit status 1 when a patch does not fit somewhere, 2 when a base could not be looked at.

    Args:
        prove: Run the proof of each patch that does not fit on the base with all patches that do: green means that
            upstream has mended the fault in its own words, which no comparison of text can see.
        python: The interpreter for the proofs.

    Raises:
        NothingChecked: the series is empty.
    """
    with working(checkout, "drift"):
        require_version(checkout.root, MERGE_TREE)
        series = load_series(checkout)
        if not series.patches:
            raise NothingChecked("the series is empty: zero patches were checked", where="patches/series")
        home = sources.fetch(checkout, checkout.pins().base(), offline=offline)
        stack = build(checkout.store(), home.tree, series.patches)
        items = items_of(series, stack)
        ask = Asker(checkout, python) if prove else None
        reports = [_report(checkout, spec, items, series.patches, offline, ask) for spec in bases]
    lines = [line for report in reports for line in _lines(report)]
    bad = any(fate.state not in FITS for report in reports for fate in report.fates)
    unseen = any(report.error for report in reports)
    return Answer(lines, {"bases": [asdict(report) for report in reports]}, 2 if unseen else 1 if bad else 0)


@dataclass(frozen=True)
class Asker:
    """Runs proofs on a tree that has not their patches."""

    checkout: Checkout
    python: str

    def __call__(self, store: Store, tree: str, found: Sequence[Fate], patches: Sequence[Patch]) -> list[Fate]:
        """Return the fates with what the proofs of the patches that do not fit say."""
        asked = {fate.slug: patch for fate, patch in zip(found, patches, strict=True)
                 if fate.state not in (*FITS, ABSORBED)}  # fmt: skip
        proofs = {slug: patch.message.trailer("Proof").strip() for slug, patch in asked.items()}
        if not proofs:
            return list(found)
        said = run_tests(self.checkout, store, tree, list(proofs.values()), self.python, PROOF_S)
        return [_told(fate, asked[fate.slug], said[proofs[fate.slug]]) if fate.slug in proofs else fate
                for fate in found]  # fmt: skip


def _told(fate: Fate, patch: Patch, proof: Outcome) -> Fate:
    if proof.state == PASSED:
        return replace(fate, state=ABSORBED, detail="its proof is green without it")
    said = f"no verdict ({proof.state}: {last_line(proof.text)})"
    if proof.state == FAILED:
        # A test may also be red because another release has other names: the reason tells the two apart.
        other = "" if stated(patch, proof) else ", but not for the reason stated,"
        said = f"red{other} ({last_line(proof.text)})"
    return replace(fate, detail=f"{fate.detail}; its proof is {said} without it")


def _report(
    checkout: Checkout,
    spec: str,
    items: list[Item],
    patches: Sequence[Patch],
    offline: Path | None,
    ask: Asker | None,
) -> Report:
    try:
        tree, alternates = _tree_of(checkout, spec, offline)
    except MpatchError as error:
        return Report(spec, "", (), error.text())
    store = checkout.store(alternates)
    found, after = fates(store, tree, items, patches)
    return Report(spec, tree, tuple(ask(store, after, found, patches) if ask else found))


def _tree_of(checkout: Checkout, spec: str, offline: Path | None) -> tuple[str, tuple[Path, ...]]:
    pins = checkout.pins()
    path, _, revision = spec.partition("@")
    if spec not in pins.bases and Path(path).is_dir():
        tree, objects = sources.clone_tree(Path(path), revision or "HEAD")
        return tree, (objects,)  # read in place: a clone may be gigabytes, and its lock is not ours
    return sources.fetch(checkout, pins.base(spec), offline=offline).tree, ()


def fates(store: Store, tree: str, items: Sequence[Item], patches: Sequence[Patch]) -> tuple[list[Fate], str]:
    """Put patch after patch on a tree, leaving out those that do not fit; say how each fares and the tree after all."""
    found, running, failed = [], tree, set[str]()
    for item, patch in zip(items, patches, strict=True):
        fate, after = fate_of(store, running, item, patch)
        needs = [slug for slug in patch.message.depends_on() if slug in failed]
        if fate.state not in FITS:
            failed.add(item.slug)
            if needs and fate.state != ABSORBED:
                fate = replace(fate, detail=f"{fate.detail}; needs {', '.join(needs)}, which does not fit".lstrip("; "))
        else:
            running = after
        found.append(_hinted(fate, patch))
    return found, running


def _hinted(fate: Fate, patch: Patch) -> Fate:
    status = patch.message.trailer("Upstream-Status").strip()
    if fate.state in (*FITS, ABSORBED) or not status.startswith("Backport"):
        return fate
    return replace(fate, detail=f"{fate.detail}; {status}: upstream may have it, --prove asks")


def fate_of(store: Store, running: str, item: Item, patch: Patch) -> tuple[Fate, str]:
    """Say how one patch fares on a tree; return the tree after it, too (the same tree when it does not fit)."""
    have = {path: store.entry(running, path) for path in (change.path for change in patch.changes)}
    if all(_has(have[change.path], change.new_id) for change in patch.changes):
        return Fate(item.slug, ABSORBED, "every file is what the patch makes of it"), running
    if all(_has(have[change.path], change.old_id) for change in patch.changes):
        return Fate(item.slug, CLEAN), store.merge(item.before, running, item.after).tree
    lost = [change.path for change in patch.changes if change.old_mode and have[change.path] is None]
    merge = store.merge(item.before, running, item.after)
    if lost:
        return _lost(store, running, item, lost, merge.tree if not merge.conflicts else ""), running
    if merge.conflicts:
        return Fate(item.slug, CONFLICT, _where(store, patch, merge.conflicts, have)), running
    if merge.tree == running:
        return Fate(item.slug, ABSORBED, "the merge leaves nothing of it"), running
    now = changes_between(store, running, merge.tree)
    if places(patch.changes) != places(now):
        return Fate(
            item.slug, ELSEWHERE, f"was {', '.join(places(patch.changes))}; now {', '.join(places(now))}"
        ), running
    # Text that merges cleanly may still say a thing twice: upstream's mend and ours.
    wrong = [
        found for path, blob in ((c.path, c.new_id) for c in now) if (found := syntax_error(path, store.blob(blob)))
    ]
    if wrong:
        return Fate(item.slug, CONFLICT, f"merges, but does not compile there: {', '.join(wrong)}"), running
    if _same_hunks(patch.changes, now):
        return Fate(item.slug, OFFSET, _offsets(patch.changes, now)), merge.tree
    return Fate(item.slug, MERGED), merge.tree


def _has(entry: Entry | None, blob: str) -> bool:
    return (entry.blob if entry else "0" * 40) == blob


def _lost(store: Store, running: str, item: Item, lost: list[str], merged: str) -> Fate:
    """A file is not at its path: find where its like went."""
    followed = [path for path, _, _ in store.diff(running, merged)] if merged else []
    if followed:
        return Fate(item.slug, MOVED, f"{', '.join(lost)} is now {', '.join(followed)}; the patch fits there")
    names = {path.rpartition("/")[2] for path in lost}
    like = [path for path in store.paths(running) if path.rpartition("/")[2] in names and "__init__" not in path]
    if like:
        return Fate(item.slug, MOVED, f"{', '.join(lost)} may be {', '.join(like[:3])}; the patch does not fit there")
    return Fate(item.slug, GONE, ", ".join(lost))


def _where(store: Store, patch: Patch, conflicts: Sequence[str], have: dict[str, Entry | None]) -> str:
    """Name the hunks whose old lines are nowhere in the file."""
    words = []
    for change in patch.changes:
        entry = have.get(change.path)
        if change.path not in conflicts or entry is None:
            continue
        lines = split(store.blob(entry.blob))
        for hunk in change.hunks:
            wanted = hunk.old()
            if not any(lines[at : at + len(wanted)] == wanted for at in range(len(lines))):
                words.append(f"{change.path}:{hunk.old_start} in {hunk.place or 'module level'}")
    return "; ".join(words) or ", ".join(conflicts)


def _same_hunks(old: Sequence[FileChange], new: Sequence[FileChange]) -> bool:
    """Return whether the changed lines and their order are the same (context and numbers may differ)."""

    def signed(changes: Sequence[FileChange]) -> list[tuple[str, str]]:
        return [
            (change.path, blob_id(b"".join(line for hunk in change.hunks for line in hunk.lines if line[:1] != b" ")))
            for change in changes
        ]

    contexts = [
        [line for hunk in change.hunks for line in hunk.old()] for change in old
    ] == [[line for hunk in change.hunks for line in hunk.old()] for change in new]  # fmt: skip
    return signed(old) == signed(new) and contexts


def _offsets(old: Sequence[FileChange], new: Sequence[FileChange]) -> str:
    pairs = [(a, b) for one, other in zip(old, new, strict=True) for a, b in zip(one.hunks, other.hunks, strict=False)]
    found = sorted({b.old_start - a.old_start for a, b in pairs if a.old_start != b.old_start})
    return f"{', '.join(f'{lines:+d}' for lines in found)} lines" if found else "same lines, changed elsewhere"


def _lines(report: Report) -> list[str]:
    if report.error:
        return [f"{report.base}: could not be looked at", *(f"  {line}" for line in report.error.split("\n"))]
    fit = sum(fate.state in FITS for fate in report.fates)
    head = f"{report.base}: {fit} of {len(report.fates)} patches fit (tree {report.tree[:12]})"
    return [
        head,
        *(f"  {fate.state:<11} {fate.slug}{': ' + fate.detail if fate.detail else ''}" for fate in report.fates),
    ]
