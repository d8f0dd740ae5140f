"""check: the gates on the whole series. Lint, each patch alone, every prefix, the round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.mpatch import lint, sources
from tools.mpatch.apply import working
from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import LintFailed, NothingChecked, UsageError
from tools.mpatch.output import Answer
from tools.mpatch.patchfile import render
from tools.mpatch.plan import Item, items_of, patch_of
from tools.mpatch.series import Series, load_series
from tools.mpatch.stack import Stack, build
from tools.mpatch.store import Store


@dataclass(frozen=True)
class Gate:
    """What a gate looked at and what it found."""

    name: str
    checked: int
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """The series on its base."""

    checkout: Checkout
    series: Series
    stack: Stack
    store: Store
    base_name: str


def gate_lint(subject: Subject) -> Gate:
    """Run the lint rules."""
    context = lint.context_of(subject.checkout, subject.series, subject.stack, subject.store, subject.base_name)
    found = lint.lint(context)
    return Gate("lint", len(lint.RULES), tuple(f"{one.slug}: {one.rule}: {one.where}: {one.text}" for one in found))


def gate_alone(subject: Subject) -> Gate:
    """Put each patch on the base with its Depends-On only; that must do, and each of them must be needed."""
    items = {item.slug: item for item in items_of(subject.series, subject.stack)}
    problems, notes = [], []
    for patch in subject.series.patches:
        needs = closure(subject.series, patch.slug)
        if alone(subject, items, needs, patch.slug) is None:
            missing = [slug for slug in _related(subject.series, patch.slug)
                       if slug not in needs and alone(subject, items, {*needs, slug}, patch.slug)]  # fmt: skip
            hint = f"; with {' or '.join(missing)} it fits" if missing else ""
            problems.append(f"{patch.slug}: does not fit with its Depends-On alone{hint}")
        for slug in patch.message.depends_on():
            fewer = closure(subject.series, patch.slug, without=slug)
            if slug not in fewer and alone(subject, items, fewer, patch.slug) is not None:
                notes.append(f"{patch.slug}: fits without {slug}: a dependency by meaning only")
    return Gate("alone", len(items), tuple(problems), tuple(notes))


def alone(subject: Subject, items: dict[str, Item], needs: set[str], slug: str) -> str | None:
    """Return the tree of base, `needs` in order, and the patch; None where one of them does not fit."""
    running = subject.stack.base_tree
    for one in [each for each in items if each in needs and each != slug] + [slug]:
        item = items[one]
        if item.before == running:
            running = item.after
            continue
        merge = subject.store.merge(item.before, running, item.after)
        if merge.conflicts:
            return None
        running = merge.tree
    return running


def closure(series: Series, slug: str, without: str = "") -> set[str]:
    """Return all patches that one needs, directly or through others."""
    by_slug = {patch.slug: patch for patch in series.patches}
    found: set[str] = set()
    left = [slug]
    while left:
        for need in by_slug[left.pop()].message.depends_on():
            if need in by_slug and need not in found and need != without:
                found.add(need)
                left.append(need)
    return found


def _related(series: Series, slug: str) -> list[str]:
    """Return the earlier patches that touch a file of this one."""
    at = series.index(slug)
    paths = {change.path for change in series.patches[at].changes}
    return [one.slug for one in series.patches[:at] if paths & {change.path for change in one.changes}]


def syntax_error(path: str, source: bytes) -> str:
    """Return what keeps a Python file from compiling, with its place, or nothing.

    >>> syntax_error("a.py", b"f(x=1, x=2)")
    'a.py:1: keyword argument repeated: x'
    >>> syntax_error("a.txt", b"f(x=1, x=2)")
    ''
    """
    try:
        if path.endswith(".py"):
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"{path}:{error.lineno}: {error.msg}"
    return ""


def gate_prefixes(subject: Subject) -> Gate:
    """Compile every Python file that a patch touches, as it is after that patch."""
    problems, checked = [], 0
    for patch in subject.series.patches:
        for change in patch.changes:
            if not change.path.endswith(".py") or not change.new_mode:
                continue
            checked += 1
            wrong = syntax_error(change.path, subject.store.blob(change.new_id))
            if wrong:
                problems.append(f"{patch.slug}: {wrong}")
    return Gate("prefixes", checked, tuple(problems))


def gate_round_trip(subject: Subject) -> Gate:
    """Export every patch again: same bytes."""
    problems = []
    items = items_of(subject.series, subject.stack)
    for item, data in zip(items, subject.series.data, strict=True):
        if render(patch_of(subject.store, item.slug, item.message, item.before, item.after)) != data:
            problems.append(f"{item.slug}: an export gives other bytes; mpatch refresh {item.slug} --from-file")
    return Gate("round trip", len(items), tuple(problems))


GATES: dict[str, Callable[[Subject], Gate]] = {
    "lint": gate_lint,
    "alone": gate_alone,
    "prefixes": gate_prefixes,
    "round-trip": gate_round_trip,
}


def check(checkout: Checkout, names: Sequence[str] = ()) -> Answer:
    """Run the gates on the series and its default base.

    Raises:
        NothingChecked: the series is empty.
        LintFailed: a gate found something; everything is listed.
    """
    unknown = set(names) - set(GATES)
    if unknown:
        raise UsageError(f"no gate {', '.join(sorted(unknown))}", remedy=f"one of {', '.join(GATES)}")
    with working(checkout, "check"):
        pins, series, store = checkout.pins(), load_series(checkout), checkout.store()
        if not series.patches:
            raise NothingChecked("the series is empty: zero patches were checked", where="patches/series")
        base = pins.base()
        fetched = sources.fetch(checkout, base)
        subject = Subject(checkout, series, build(store, fetched.tree, series.patches), store, base.name)
        gates = [GATES[name](subject) for name in names or GATES]
    problems = [f"{gate.name}: {text}" for gate in gates for text in gate.problems]
    if problems:
        raise LintFailed(
            f"{len(problems)} findings", why="\n".join(problems), remedy="docs/patching.md says how to mend each"
        )
    lines = [f"{gate.name}: {gate.checked} checked, nothing found" for gate in gates]
    lines += [f"note: {text}" for gate in gates for text in gate.notes]
    return Answer(lines, {gate.name: {"checked": gate.checked, "notes": list(gate.notes)} for gate in gates})
