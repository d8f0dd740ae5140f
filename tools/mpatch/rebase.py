"""rebase: move the whole series to another base, resumable."""

from __future__ import annotations

from pathlib import Path

from tools.mpatch import move, sources
from tools.mpatch.apply import working
from tools.mpatch.checkout import Checkout
from tools.mpatch.edit import open_tree
from tools.mpatch.errors import UsageError
from tools.mpatch.git import require_version
from tools.mpatch.output import Answer
from tools.mpatch.plan import items_of
from tools.mpatch.tree import foreign
from tools.mpatch.worktree import differences

MERGE_TREE = (2, 38)  # the first git with `merge-tree --write-tree`


def rebase(
    checkout: Checkout,
    onto: str,
    *,
    offline: Path | None = None,
    origin: str = "",
    drop_absorbed: bool = False,
) -> Answer:
    """Move the series onto a base of upstream.toml and make that the default.

    Nothing under patches/ changes before all patches have found their place.

    Raises:
        MoveConflict, WrongPlace, PatchAbsorbed: the move waits; `resume` or `abort` end it.
    """
    with working(checkout, "rebase"):
        require_version(checkout.root, MERGE_TREE)
        state, series = open_tree(checkout)
        base, store = checkout.pins().base(onto), checkout.store()
        if base.name == state.base and base.tree == state.base_tree:
            raise UsageError(f"the series is on {onto} already", remedy="mpatch status")
        edits = differences(checkout.place, store.tree(state.tree))
        if edits:
            raise foreign(edits, checkout.shown(checkout.place))
        fetched = sources.fetch(checkout, base, offline=offline, origin=origin)
        plan = move.Move("rebase", base.name, fetched.tree, items_of(series, state.stack()), state, state.tree)
        return move.run_move(checkout, store, state, series, plan, drop_absorbed=drop_absorbed)


def resume(checkout: Checkout, *, drop_absorbed: bool = False) -> Answer:
    """Go on after a person has settled the place that the move waited at."""
    with working(checkout, "rebase --continue"):
        return move.resume(checkout, drop_absorbed=drop_absorbed)


def abort(checkout: Checkout) -> Answer:
    """Leave the move."""
    with working(checkout, "rebase --abort"):
        return move.abort(checkout)
