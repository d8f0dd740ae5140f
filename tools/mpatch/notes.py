"""release-notes: a page on what changed between two states of the series, made from the patches themselves."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import UsageError
from tools.mpatch.files import write_bytes
from tools.mpatch.output import Answer
from tools.mpatch.patchfile import Patch
from tools.mpatch.snapshot import Snapshot, last_release, snapshot

# How large the series may grow is the maintainers' concern, not a user's.
PRIVATE_TABLES = ("budget", "schema")


@dataclass(frozen=True)
class Changes:
    """What differs between two states, by slug; `changed` holds patches whose lines or message are others."""

    new: tuple[str, ...]
    gone: tuple[str, ...]
    changed: tuple[str, ...]
    same: tuple[str, ...]
    reordered: bool
    pins: Mapping[str, tuple[str, str]]


def release_notes(checkout: Checkout, since: str = "", to: str = "", output: Path | None = None) -> Answer:
    """Return the page as Markdown, or write it.

    Args:
        since: A revision or folder (default: the last release tag; without one, everything is new).
        to: A revision or folder (default: the checkout as it is).

    Raises:
        SnapshotUnreadable: a state cannot be read.
        UsageError: the page cannot be written there.
    """
    after = snapshot(checkout, to)
    start = since or last_release(checkout, to)
    before = snapshot(checkout, start) if start else None
    changes = compare(before, after)
    text = page(before, after, changes)
    data = {
        "version": after.version,
        "since": before.version if before else "",
        "series_digest": after.digest,
        **{name: list(getattr(changes, name)) for name in ("new", "gone", "changed", "same")},
        "reordered": changes.reordered,
        "pins": {name: list(pair) for name, pair in changes.pins.items()},
    }
    if output is None:
        return Answer([text.rstrip("\n")], {**data, "page": text})
    try:
        write_bytes(output, text.encode())
    except OSError as error:
        raise UsageError("the page cannot be written", where=str(output), why=str(error.strerror),
                         remedy="name a file in a folder that you may write to") from None  # fmt: skip
    return Answer([f"wrote {output}"], {**data, "wrote": str(output)})


def compare(before: Snapshot | None, after: Snapshot) -> Changes:
    """Sort the patches of two states: new, gone, changed, the same."""
    old = _by_slug(before)
    now = _by_slug(after)
    both = [slug for slug in now if slug in old]
    return Changes(
        new=tuple(slug for slug in now if slug not in old),
        gone=tuple(slug for slug in old if slug not in now),
        changed=tuple(slug for slug in both if _differs(old[slug], now[slug])),
        same=tuple(slug for slug in both if not _differs(old[slug], now[slug])),
        reordered=[slug for slug in old if slug in now] != both,
        pins=_pins(before, after) if before else {},
    )


def page(before: Snapshot | None, after: Snapshot, changes: Changes) -> str:
    """Return the page: what moved, then each new, gone and changed patch."""
    old, now = _by_slug(before), _by_slug(after)
    lines = [f"# megatron-moe {after.version}", "", *_head(before, after, changes), ""]
    for title, told in (
        ("New patches", [_new(now[slug]) for slug in changes.new]),
        ("Patches that are gone", [_gone(old[slug]) for slug in changes.gone]),
        ("Changed patches", [_changed(old[slug], now[slug]) for slug in changes.changed]),
    ):
        lines += [f"## {title}", ""] if told else []
        for part in told:
            lines += [*part, ""]
    if changes.pins:
        lines += ["## Pins", "", "| pin | before | now |", "|---|---|---|"]
        lines += [f"| {name} | {was or '-'} | {is_ or '-'} |" for name, (was, is_) in changes.pins.items()] + [""]
    return "\n".join(lines)


def _head(before: Snapshot | None, after: Snapshot, changes: Changes) -> list[str]:
    base = after.pins.base().describe()
    size = f"+{sum(one.added() for one in after.series.patches)} -{sum(one.removed() for one in after.series.patches)}"
    digest = f"Series digest `{after.digest}`." if after.digest else "No digest: no tree id is pinned for the base."
    if before is None:
        return [f"The first release: {base} with {len(changes.new)} patches, {size} lines. {digest}"]
    was = before.pins.base().describe()
    moved = f"on {base}, as before" if was == base else f"moved from {was} to {base}"
    counts = ", ".join(f"{len(getattr(changes, name))} {word}" for name, word in
                       (("new", "new"), ("gone", "gone"), ("changed", "changed"), ("same", "the same")))  # fmt: skip
    order = " They are applied in another order." if changes.reordered else ""
    return [
        f"Since {before.version} ({before.name}): {moved}. {len(after.series.patches)} patches, {size} lines: "
        f"{counts}.{order} {digest}"
    ]


def _new(patch: Patch) -> Iterator[str]:
    said = patch.message
    yield f"### {patch.slug}"
    yield ""
    yield f"{said.subject}. {_sentence(said.trailer('Reason'))}"
    if said.body:
        yield ""
        yield said.body
    yield ""
    yield f"{_size(patch)}. Upstream: {said.trailer('Upstream-Status')}. Goes: {said.trailer('Removal-Plan')}."


def _gone(patch: Patch) -> Iterator[str]:
    said = patch.message
    yield f"### {patch.slug}"
    yield ""
    yield f"{said.subject}. It was to go: {said.trailer('Removal-Plan')}. Last known upstream: " + (
        f"{said.trailer('Upstream-Status')}."
    )


def _changed(old: Patch, now: Patch) -> Iterator[str]:
    yield f"### {now.slug}"
    yield ""
    yield f"{now.message.subject}."
    yield ""
    if old.message.subject != now.message.subject:
        yield f"- subject was: {old.message.subject}"
    before, after = dict(old.message.trailers), dict(now.message.trailers)
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield f"- {key}: {before.get(key, 'none')} → {after.get(key, 'none')}"
    if old.message.body != now.message.body:
        yield "- explained anew"
    diff = list(difflib.unified_diff(_lines(old), _lines(now), lineterm="", n=1))[2:]
    if diff:
        yield f"- code: {_size(old)} → {_size(now)}"
        yield ""
        yield "```diff"
        yield from (line for line in diff if not line.startswith("@@"))
        yield "```"
    elif old.changes != now.changes:
        yield "- the same lines at another place"


def _lines(patch: Patch) -> list[str]:
    """Return the patch's own lines, each file named first; its context is upstream's and moves with it."""
    found = []
    for change in patch.changes:
        found.append(f"in {change.path}")
        found += [
            line.rstrip(b"\n").decode("utf-8", "replace")
            for hunk in change.hunks
            for line in hunk.lines
            if line[:1] in b"+-"
        ]
    return found


def _size(patch: Patch) -> str:
    return f"+{patch.added()} -{patch.removed()} in {', '.join(f'`{change.path}`' for change in patch.changes)}"


def _sentence(text: str) -> str:
    """Return text that ends like a sentence and starts like one.

    >>> _sentence("training dies at start")
    'Training dies at start.'
    """
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def _differs(old: Patch, now: Patch) -> bool:
    return (old.message.text(), old.changes) != (now.message.text(), now.changes)


def _by_slug(state: Snapshot | None) -> dict[str, Patch]:
    return {patch.slug: patch for patch in state.series.patches} if state else {}


def _pins(before: Snapshot, after: Snapshot) -> dict[str, tuple[str, str]]:
    old, now = dict(_flat(before.pins.raw)), dict(_flat(after.pins.raw))
    return {
        name: (old.get(name, ""), now.get(name, ""))
        for name in dict.fromkeys([*now, *old])
        if old.get(name) != now.get(name)
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names and values.

    >>> list(_flat({"a": {"b": 1}, "budget": {"hunks": 9}}))
    [('a.b', '1')]
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            if key not in PRIVATE_TABLES:
                yield from _flat(value, f"{prefix}{key}.")
        elif key not in PRIVATE_TABLES:
            yield f"{prefix}{key}", str(value)
