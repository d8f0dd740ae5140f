"""Moving patches: a plan of changes is put on a starting tree, exactly where possible, else by three-way merge.

refresh, new, drop and rebase are all this: they differ in the plan and in the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.mpatch.message import Message
from tools.mpatch.patchfile import FileChange, Patch
from tools.mpatch.series import Series
from tools.mpatch.stack import Stack
from tools.mpatch.store import Store
from tools.mpatch.textdiff import changes_between

# How a change came to its new place.
EXACT, MERGED, RESOLVED = "exact", "merged", "resolved"
# Why a move stopped.
CONFLICT, WRONG_PLACE, ABSORBED = "conflict", "wrong place", "absorbed"


@dataclass(frozen=True)
class Item:
    """One patch of a plan: what it changed from (`before`) and to (`after`), as whole trees."""

    slug: str
    message: Message
    before: str
    after: str

    def plain(self) -> dict[str, Any]:
        """Return the item as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Item:
        """Read what `plain` gave."""
        said = dict(values["message"])
        said["trailers"] = tuple((key, value) for key, value in said["trailers"])
        return cls(values["slug"], Message(**said), values["before"], values["after"])


@dataclass(frozen=True)
class Moved:
    """An item at its new place."""

    slug: str
    before: str
    after: str
    how: str


@dataclass(frozen=True)
class Stop:
    """Why and where a move stopped. `tree` is what a person is shown: with conflict markers, or the merged result."""

    slug: str
    reason: str
    tree: str
    paths: tuple[str, ...] = ()
    was: tuple[str, ...] = ()
    now: tuple[str, ...] = ()


def items_of(series: Series, stack: Stack) -> list[Item]:
    """Return the series as a plan."""
    found, below = [], stack.base_tree
    for patch, step in zip(series.patches, stack.steps, strict=True):
        found.append(Item(patch.slug, patch.message, below, step.tree))
        below = step.tree
    return found


def advance(
    store: Store, items: Sequence[Item], running: str, *, drop_absorbed: bool = False
) -> tuple[list[Moved], Stop | None]:
    """Put the items on the tree `running`, one after the other, until the end or the first that needs a person."""
    moved: list[Moved] = []
    for item in items:
        if item.before == running:
            moved.append(Moved(item.slug, running, item.after, EXACT))
        else:
            merge = store.merge(item.before, running, item.after)
            stop = _judge(store, item, running, merge.tree, merge.conflicts)
            if stop is not None and not (stop.reason == ABSORBED and drop_absorbed):
                return moved, stop
            moved.append(Moved(item.slug, running, merge.tree, MERGED))
        running = moved[-1].after
    return moved, None


def _judge(store: Store, item: Item, running: str, tree: str, conflicts: tuple[str, ...]) -> Stop | None:
    if conflicts:
        return Stop(item.slug, CONFLICT, tree, conflicts)
    if tree == running:
        return Stop(item.slug, ABSORBED, tree)
    was, now = (
        places(changes_between(store, item.before, item.after)),
        places(changes_between(store, running, tree)),
    )
    if was != now:
        return Stop(item.slug, WRONG_PLACE, tree, was=was, now=now)
    return None


def places(changes: Sequence[FileChange]) -> tuple[str, ...]:
    """Return the def path of every hunk, with the file's name but not its folder, sorted.

    Files move between folders at times; functions that the patch changes must not.
    """
    return tuple(
        sorted(
            {
                f"{change.path.rpartition('/')[2]}: {hunk.place or 'module level'}"
                for change in changes
                for hunk in change.hunks
            }
        )
    )


def patch_of(store: Store, slug: str, said: Message, before: str, after: str) -> Patch:
    """Return the canonical patch that turns `before` into `after`."""
    return Patch(slug, said, changes_between(store, before, after))
