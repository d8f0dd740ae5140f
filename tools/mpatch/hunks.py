"""prove --hunks: which hunks the proof does not miss. Each is taken out alone, the rest of the patch stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tools.mpatch.patchfile import Hunk, Patch, apply_change
from tools.mpatch.store import Store


@dataclass(frozen=True)
class Without:
    """A tree that has a patch but for one hunk; `where` says which."""

    slug: str
    where: str
    tree: str


def each_without(store: Store, patch: Patch, before: str) -> Iterator[Without]:
    """Yield the tree without each hunk of a patch of several hunks, put on the tree `before`."""
    hunks = [(at, hunk) for at, change in enumerate(patch.changes) for hunk in change.hunks]
    if len(hunks) < 2:
        return
    for at, hunk in hunks:
        change = patch.changes[at]
        where = f"{change.path}:{hunk.old_start} in {hunk.place or 'module level'}"
        yield Without(patch.slug, where, _tree(store, patch, before, hunk))


def _tree(store: Store, patch: Patch, before: str, left_out: Hunk) -> str:
    found: dict[str, tuple[str, bytes] | None] = {}
    for change in patch.changes:
        kept = tuple(hunk for hunk in change.hunks if hunk is not left_out)
        if change.hunks and not kept:
            continue
        entry = store.entry(before, change.path)
        data = store.blob(entry.blob) if entry else b""
        made = apply_change(replace(change, hunks=kept), data, f"patches/{patch.slug}.patch")
        found[change.path] = (change.new_mode, made) if change.new_mode else None
    return store.change_tree(before, found)
