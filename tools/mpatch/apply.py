"""fetch, apply, status, verify: from the pin and the series to build/megatron, and whether it still is that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.mpatch import sources
from tools.mpatch.checkout import Checkout, refuse_installed
from tools.mpatch.errors import (
    EditOpen,
    MpatchError,
    NothingChecked,
    StateUnreadable,
    TreeMissing,
    UsageError,
    VerifyFailed,
)
from tools.mpatch.files import finish_swap, locked, recover, remove_git_locks, write_bytes
from tools.mpatch.output import Answer
from tools.mpatch.pinned import Progress
from tools.mpatch.pins import Base, Pins
from tools.mpatch.records import write_records
from tools.mpatch.series import Series, load_series
from tools.mpatch.stack import Stack, build
from tools.mpatch.state import APPLIED, State, load_state
from tools.mpatch.store import Store
from tools.mpatch.tree import foreign, lay_out, listed, worktree_tree
from tools.mpatch.worktree import differences


@contextmanager
def working(checkout: Checkout, what: str) -> Iterator[None]:
    """Hold the lock of the checkout, with everything that a killed command left put in order first."""
    refuse_installed(checkout.root)
    with locked(checkout.lock, what):
        recover(checkout.journal, checkout.root)
        finish_swap(checkout.place)
        remove_git_locks(checkout.own / "store.git")
        yield


def apply(
    checkout: Checkout,
    *,
    base_name: str = "",
    offline: Path | None = None,
    origin: str = "",
    save: Path | None = None,
    discard: bool = False,
    progress: Progress | None = None,
) -> Answer:
    """Make build/megatron the pinned base with the whole series on it.

    Raises:
        ForeignEdits: the tree has changes that no patch has and neither `save` nor `discard` was given.
        EditOpen: a rebase waits there.
    """
    with working(checkout, "apply"):
        pins = checkout.pins()
        base = pins.base(base_name)
        series = load_series(checkout)
        return _apply(checkout, pins, base, series, offline, origin, save, discard, progress)


def _apply(
    checkout: Checkout,
    pins: Pins,
    base: Base,
    series: Series,
    offline: Path | None,
    origin: str,
    save: Path | None,
    discard: bool,
    progress: Progress | None,
) -> Answer:
    count = len(series.patches)
    if checkout.move_file.exists() and not discard:
        raise EditOpen(
            "a rebase or refresh waits in this tree",
            where=checkout.shown(checkout.place),
            remedy="mpatch rebase --continue, or: mpatch rebase --abort",
        )
    state = _state_or_none(checkout, discard)
    store = checkout.store()
    if (
        state
        and state.mode == APPLIED
        and state.series_digest == series.digest(state.base_tree)
        and state.base == base.name
        and (not base.tree or base.tree == state.base_tree)
    ):
        edits = differences(checkout.place, store.tree(state.tree))
        if not edits:
            wrote = write_records(checkout, store, pins, series, state)
            return Answer(
                [f"already applied ({count} of {count}) on {base.describe()}"],
                _data(checkout, state, "already applied", [checkout.shown(path) for path in wrote]),
            )
    fetched = sources.fetch(checkout, base, offline=offline, origin=origin, progress=progress)
    stack = build(store, fetched.tree, series.patches)
    if state is not None:
        _settle_edits(checkout, store, state, stack, save, discard)
    made = State(base.name, fetched.tree, stack.base_commit, stack.tree, series.digest(fetched.tree), stack.steps)
    lay_out(store, checkout.place, stack.commit, stack.tree, made)
    checkout.move_file.unlink(missing_ok=True)
    wrote = [checkout.place, *write_records(checkout, store, pins, series, made)]
    unchecked = "" if fetched.checked else "; the base is unchecked: no tree id is pinned"
    return Answer(
        [f"applied ({count} of {count}) on {base.describe()}{unchecked}"],
        _data(checkout, made, "applied", [checkout.shown(path) for path in wrote]),
    )


def _state_or_none(checkout: Checkout, discard: bool) -> State | None:
    try:
        return load_state(checkout.place)
    except StateUnreadable:
        if discard:
            return None
        raise


def _settle_edits(
    checkout: Checkout, store: Store, state: State, stack: Stack, save: Path | None, discard: bool
) -> None:
    """Refuse edits that would be lost; those that the new series has already (a killed refresh) are no loss."""
    on_disk, edits = worktree_tree(store, checkout.place, state.tree)
    if not edits or discard or on_disk in {step.tree for step in stack.steps}:
        return
    if save is None:
        raise foreign(edits, checkout.shown(checkout.place))
    if save.exists():
        raise UsageError(
            "the edits would overwrite a file",
            where=str(save),
            why="it is there already, perhaps with edits saved before",
            remedy="give --save another name",
        )
    write_bytes(save, store.repo.run("diff", "--binary", "--full-index", state.tree, on_disk).out)


def _data(checkout: Checkout, state: State, result: str, wrote: list[str]) -> dict[str, Any]:
    return {
        "result": result,
        "base": state.base,
        "base_tree": state.base_tree,
        "patched_tree": state.tree,
        "patches": [step.slug for step in state.steps],
        "tree": checkout.shown(checkout.place),
        "wrote": wrote,
    }


def verify(checkout: Checkout) -> Answer:
    """Prove the tree: base by its pinned tree id, each patch's files before and after, each file on disk.

    Raises:
        NothingChecked: the series is empty.
        VerifyFailed: something differs; everything that does is listed.
    """
    pins, series = checkout.pins(), load_series(checkout)
    state = load_state(checkout.place)
    if state is None:
        raise TreeMissing("there is no patched tree", where=checkout.shown(checkout.place), remedy="mpatch apply")
    if not series.patches:
        raise NothingChecked(
            "the series is empty: zero patches were checked",
            where="patches/series",
            remedy="mpatch new TOPIC/SLUG",
        )
    base, store = pins.base(state.base), checkout.store()
    problems: list[str] = []
    if base.tree and base.tree != state.base_tree:
        problems.append(f"base is {state.base_tree}, pin is {base.tree}")
    if state.mode == APPLIED and state.series_digest != series.digest(state.base_tree):
        problems.append("patches/ has changed since the tree was made")
    stack = build(store, state.base_tree, series.patches)  # compares every blob before and after each patch
    if state.mode == APPLIED and stack.tree != state.tree:
        problems.append(f"tree is {state.tree}, base and series give {stack.tree}")
    edits = differences(checkout.place, store.tree(state.tree))
    if edits:
        problems.append(listed(edits))
    if state.mode != APPLIED:
        problems.append(f"{state.mode} of {state.slug} is open")
    if problems:
        raise VerifyFailed(
            "the tree is not what base and series give",
            where=checkout.shown(checkout.place),
            why="\n".join(problems),
            remedy="mpatch status, then: mpatch apply",
        )
    blobs = sum(len(patch.changes) for patch in series.patches)
    files = len(store.tree(state.tree))
    checked = "" if base.tree else " (base unchecked: no tree id pinned)"
    return Answer(
        [
            f"verified: base {state.base_tree[:12]}{checked}, {len(series.patches)} patches, {blobs} files "
            f"before and after, {files} files on disk"
        ],
        {**_data(checkout, state, "verified", []), "blobs_checked": blobs, "files_checked": files},
    )


def status(checkout: Checkout) -> Answer:
    """Say what is there: pins, base, series, tree, open edit, foreign edits. Exit 0 only when all is in order."""
    try:
        with working(checkout, "status"):
            pass  # only to put in order what a killed command left
    except (MpatchError, OSError):
        pass  # another mpatch works, or the disk is read-only: look all the same
    pins, store = checkout.pins(), checkout.store()
    lines, data = [], dict[str, Any]()
    for name, base in sorted(pins.bases.items()):
        if not base.tree:
            word = "unchecked: no tree id is pinned, nobody here could fetch it"
        else:
            word = "in the store, tree verified" if store.has_tree(base.tree) else "not fetched"
        default = " (default)" if name == pins.default_base else ""
        lines.append(f"base {name}{default}: {base.describe()}: {word}")
        data.setdefault("bases", {})[name] = {"describe": base.describe(), "state": word}
    series = load_series(checkout)
    state = load_state(checkout.place)
    lines.append(f"series: {len(series.patches)} patches")
    word, code = _tree_word(checkout, pins, series, state, store)
    lines.append(f"tree {checkout.shown(checkout.place)}: {word}")
    data |= {
        "patches": series.slugs(),
        "tree": word,
        "mode": state.mode if state else "missing",
        "open": state.slug if state else "",
    }
    return Answer(lines, data, code)


def _tree_word(checkout: Checkout, pins: Pins, series: Series, state: State | None, store: Store) -> tuple[str, int]:
    if state is None:
        return "missing; mpatch apply makes it", 2
    edits = differences(checkout.place, store.tree(state.tree))
    edited = f"; {len(edits)} files edited:\n{listed(edits)}" if edits else ""
    if checkout.move_file.exists():
        return f"a move waits at {state.slug}; mpatch rebase --continue or --abort{edited}", 1
    if state.mode != APPLIED:
        return (
            f"{state.mode} of {state.slug} is open; mpatch refresh ends it, mpatch apply leaves it{edited}",
            1,
        )
    pinned = pins.bases.get(state.base)
    if pinned is None or (pinned.tree and pinned.tree != state.base_tree):
        return f"stale: made from base {state.base_tree[:12]}, the pin has moved; mpatch apply{edited}", 1
    if state.series_digest != series.digest(state.base_tree):
        return f"stale: patches/ has changed; mpatch apply{edited}", 1
    if edits:
        return f"edited by hand{edited}", 1
    count = len(series.patches)
    return f"applied ({count} of {count}) on {state.base}", 0
