"""The lint: one rule a small class. `CONTEXT` is what a rule may look at; each yields what it found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from tools.mpatch import readme
from tools.mpatch.checkout import Checkout
from tools.mpatch.message import OPTIONAL_TRAILERS, TRAILERS, UPSTREAM_STATUS
from tools.mpatch.patchfile import Patch, apply_change, render, split
from tools.mpatch.pins import SCOPES, Budget
from tools.mpatch.series import Series
from tools.mpatch.stack import Stack
from tools.mpatch.store import Store
from tools.mpatch.textdiff import occurrences, place_of_lines

SUBJECT_WIDTH = 75
NODE_ID = re.compile(r"[\w./-]+\.py(?:(::\w+)+(\[[^\]]*\])?)?")
IDENTITY = re.compile(r"[^<>]+ <[^<>@\s]+@[^<>@\s]+>")


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found."""

    rule: str
    slug: str
    where: str
    text: str


@dataclass(frozen=True)
class Context:
    """The series as files, and the stack that it gives."""

    root: Path
    patches_folder: Path
    series: Series
    stack: Stack
    store: Store
    budget: Budget
    base_scope: str


class Rule(Protocol):
    """A rule looks at one thing and says where it is wrong. Its docstring is what `mpatch lint --rules` prints."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield (slug, where, text)."""


class TrailersComplete:
    """Every mandatory trailer is there, once, not empty, and none is unknown."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield what is missing or strange."""
        for patch in context.series.patches:
            keys = [key for key, _ in patch.message.trailers]
            for key in TRAILERS:
                if keys.count(key) != 1 or not patch.message.trailer(key).strip():
                    many = key == "Signed-off-by" and keys.count(key) > 1  # several people may sign
                    if not many:
                        yield patch.slug, key, f"the trailer stands there {keys.count(key)} times or is empty"
            for key in sorted(set(keys) - {*TRAILERS, *OPTIONAL_TRAILERS}):
                yield patch.slug, key, "unknown trailer"


class UpstreamStatusKnown:
    """Upstream-Status is one of Yocto's words; Submitted, Backport, Denied and Inappropriate say more in brackets."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield statuses that tools could not read."""
        for patch in context.series.patches:
            value = patch.message.trailer("Upstream-Status")
            match = re.fullmatch(r"([A-Za-z-]+)( \[[^\]]+\])?", value)
            if match is None or match[1] not in UPSTREAM_STATUS:
                yield patch.slug, "Upstream-Status", f"{value!r} is none of {', '.join(UPSTREAM_STATUS)}"
            elif match[1] in ("Submitted", "Backport", "Denied", "Inappropriate") and not match[2]:
                yield patch.slug, "Upstream-Status", f"{match[1]} needs a reference or a reason in [brackets]"


class ScopeFits:
    """Scope is sdist or git, and the base has what it needs."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield scopes that are unknown or too wide for the base."""
        for patch in context.series.patches:
            scope = patch.message.trailer("Scope")
            if scope not in SCOPES:
                yield patch.slug, "Scope", f"{scope!r} is none of {', '.join(SCOPES)}"
            elif scope == "git" and context.base_scope == "sdist":
                yield patch.slug, "Scope", "the base is an sdist; a patch of scope git cannot be in its series"


class DependsOnEarlier:
    """Depends-On names patches of the series that stand before this one."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield dependencies that are unknown or come later."""
        seen: set[str] = set()
        for patch in context.series.patches:
            for slug in patch.message.depends_on():
                if slug not in seen:
                    yield patch.slug, "Depends-On", f"{slug} does not stand before it in the series"
            seen.add(patch.slug)


class ProofExists:
    """Proof is the id of a test, or of a file of tests, that is in the repository."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield proofs that cannot be run."""
        for patch in context.series.patches:
            proof = patch.message.trailer("Proof").strip()
            if not NODE_ID.fullmatch(proof):
                yield patch.slug, "Proof", f"{proof!r} is no test id like tests/ext/patches/test_x.py::test_y"
                continue
            path, _, names = proof.partition("::")
            file, last = context.root / path, names.split("::")[-1].partition("[")[0]
            if not file.is_file() or (last and not re.search(rf"\b(def|class) {last}\b", file.read_text("utf-8"))):
                yield patch.slug, "Proof", f"there is no test {proof}"


class SignedOff:
    """Signed-off-by is a real name and address: upstream enforces the DCO."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield signatures that upstream would refuse."""
        for patch in context.series.patches:
            value = patch.message.trailer("Signed-off-by")
            if not IDENTITY.fullmatch(value) or "Name <address>" in value:
                yield patch.slug, "Signed-off-by", f"{value!r} is not Name <mail address>"


class SubjectReads:
    """The subject is one short line that starts with a capital letter and has no full stop."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield subjects that do not read well in a log."""
        for patch in context.series.patches:
            subject = patch.message.subject
            if len(subject) > SUBJECT_WIDTH:
                yield patch.slug, "Subject", f"{len(subject)} characters, at most {SUBJECT_WIDTH}"
            if subject.endswith(".") or not subject[:1].isupper():
                yield patch.slug, "Subject", "starts with a capital letter and has no full stop"


class Canonical:
    """The file is byte for byte what mpatch writes."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield patches that were edited by hand or made by another tool."""
        for patch, data in zip(context.series.patches, context.series.data, strict=True):
            if render(patch) != data:
                lines = zip(render(patch).split(b"\n"), data.split(b"\n"), strict=False)
                line = next((at for at, (ours, theirs) in enumerate(lines, 1) if ours != theirs), 0)
                yield (
                    patch.slug,
                    f"patches/{patch.slug}.patch:{line}",
                    "not as mpatch writes it: mpatch refresh SLUG --from-file",
                )


class ContextUnique:
    """Every hunk's old lines stand in one place of its file only: like functions are a trap for every tool."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield hunks that would fit elsewhere, too."""
        for patch, path, old, _ in _versions(context):
            change = next(one for one in patch.changes if one.path == path)
            lines = split(old)
            for hunk in change.hunks:
                count = occurrences(lines, hunk.old()) if old else 1
                if count > 1:
                    yield (
                        patch.slug,
                        f"{path}:{hunk.old_start}",
                        f"the context fits in {count} places: mpatch refresh SLUG --from-file",
                    )


class PlaceRecorded:
    """The text behind @@ is the class and function that the hunk changes."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield hunks with another text."""
        for patch, path, _, new in _versions(context):
            change = next(one for one in patch.changes if one.path == path)
            for hunk in change.hunks:
                place = place_of_lines(path, new, hunk.new_start + (hunk.new_count == 0), hunk.lines)
                if place != hunk.place:
                    yield patch.slug, f"{path}:{hunk.new_start}", f"says {hunk.place!r}, stands in {place!r}"


class AddedLinesClean:
    """Added lines have no blanks at their end, no tabs in Python, no conflict markers."""

    BAD: ClassVar = re.compile(rb"[ \t]+$|^(<{7}|={7}|>{7})( |$)")

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield unclean lines."""
        for patch in context.series.patches:
            for change in patch.changes:
                for line in (line for hunk in change.hunks for line in hunk.lines if line[:1] == b"+"):
                    text = line[1:].rstrip(b"\n")
                    if self.BAD.search(text) or (change.path.endswith(".py") and b"\t" in text):
                        yield patch.slug, change.path, f"unclean line {text.decode('utf-8', 'replace')!r}"


class ThinEnough:
    """A patch adds few lines: code belongs into megatron_ext, the patch only calls it."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield patches over the limit of [budget] added_lines_per_patch."""
        limit = context.budget.added_lines_per_patch
        for patch in context.series.patches:
            if patch.added() > limit:
                yield patch.slug, "size", f"{patch.added()} added lines, at most {limit}"


class WithinBudget:
    """The whole series stays within [budget]: patches, added lines, hunks, touches of hot files."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield totals over their limit."""
        for name, used, limit in budget_use(context.series, context.budget):
            if used > limit:
                yield "series", name, f"{used}, at most {limit} (upstream.toml [budget])"


class ReadmeFresh:
    """patches/README.md is what the headers give."""

    def find(self, context: Context) -> Iterator[tuple[str, str, str]]:
        """Yield the page when it is stale."""
        path = context.patches_folder / "README.md"
        if not path.is_file() or path.read_text(encoding="utf-8") != readme.readme(context.series):
            yield "series", "patches/README.md", "stale: mpatch list --write-readme"


RULES: tuple[Rule, ...] = (
    TrailersComplete(),
    UpstreamStatusKnown(),
    ScopeFits(),
    DependsOnEarlier(),
    ProofExists(),
    SignedOff(),
    SubjectReads(),
    Canonical(),
    ContextUnique(),
    PlaceRecorded(),
    AddedLinesClean(),
    ThinEnough(),
    WithinBudget(),
    ReadmeFresh(),
)


def lint(context: Context) -> list[Finding]:
    """Return what all rules found."""
    return [Finding(type(rule).__name__, *found) for rule in RULES for found in rule.find(context)]


def context_of(checkout: Checkout, series: Series, stack: Stack, store: Store, base_name: str) -> Context:
    """Return what the rules look at."""
    pins = checkout.pins()
    return Context(checkout.root, checkout.patches, series, stack, store, pins.budget, pins.base(base_name).scope)


def budget_use(series: Series, budget: Budget) -> list[tuple[str, int, int]]:
    """Return (name, used, limit) of every total."""
    rows = [
        ("patches", len(series.patches), budget.patches),
        ("added lines", sum(patch.added() for patch in series.patches), budget.added_lines),
        ("hunks", sum(patch.hunks() for patch in series.patches), budget.hunks),
    ]
    touches = [(change.path, len(change.hunks)) for patch in series.patches for change in patch.changes]
    for path, limit in budget.hot_files.items():
        rows.append((f"hunks in {path}", sum(count for touched, count in touches if touched == path), limit))
    return rows


def _versions(context: Context) -> Iterator[tuple[Patch, str, bytes, bytes]]:
    """Yield (patch, path, content before, content after) of every change."""
    for patch in context.series.patches:
        for change in patch.changes:
            old = context.store.blob(change.old_id) if change.old_mode else b""
            yield patch, change.path, old, apply_change(change, old, patch.slug)
