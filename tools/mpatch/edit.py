"""new, edit, refresh, drop: change the series through the tree."""

from __future__ import annotations

from dataclasses import replace

from tools.mpatch.apply import working
from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import (
    EditOpen,
    MoveConflict,
    NoEditOpen,
    NothingToRefresh,
    SeriesWrong,
    TreeMissing,
    UsageError,
)
from tools.mpatch.files import write_bytes
from tools.mpatch.message import Message, message
from tools.mpatch.move import Move, run_move
from tools.mpatch.output import Answer
from tools.mpatch.patchfile import Patch, apply_change
from tools.mpatch.plan import Item, items_of
from tools.mpatch.series import SLUG, Series, load_series
from tools.mpatch.state import APPLIED, EDIT, NEW, State, dump, load_state, state_path
from tools.mpatch.store import Store
from tools.mpatch.tree import foreign, lay_out, worktree_tree
from tools.mpatch.worktree import differences

TEMPLATE = """{subject}

Say why in a sentence or two.

Upstream-Status: Pending
Reason: {subject}
Removal-Plan: when a release of upstream has it
Scope: sdist
Depends-On: none
Proof: tests/ext/patches/test_{name}.py::test_{name}
Signed-off-by: Name <address>
"""


def open_tree(checkout: Checkout, *, modes: tuple[str, ...] = (APPLIED,)) -> tuple[State, Series]:
    """Return state and series when the tree is there, made from this series, and in one of `modes`.

    Raises:
        TreeMissing: there is no tree, or patches/ has changed since.
        EditOpen: something else is open.
    """
    state, series = load_state(checkout.place), load_series(checkout)
    if state is None or state.series_digest != series.digest(state.base_tree):
        raise TreeMissing(
            "the tree is not made from this series" if state else "there is no patched tree",
            where=checkout.shown(checkout.place),
            remedy="mpatch apply",
        )
    if checkout.move_file.exists():
        raise EditOpen("a rebase or refresh waits", remedy="mpatch rebase --continue, or: mpatch rebase --abort")
    if state.mode not in modes:
        raise EditOpen(
            f"{state.mode} of {state.slug} is open",
            where=checkout.shown(checkout.place),
            remedy="mpatch refresh ends it, mpatch apply leaves it",
        )
    return state, series


def edit(checkout: Checkout, slug: str) -> Answer:
    """Lay the tree out with the series up to and including one patch."""
    with working(checkout, "edit"):
        state, series = open_tree(checkout, modes=(APPLIED, EDIT, NEW))
        at, store = series.index(slug), checkout.store()
        edits = differences(checkout.place, store.tree(state.tree))
        if edits:
            raise foreign(edits, checkout.shown(checkout.place))
        step = state.steps[at]
        opened = replace(state, mode=EDIT, slug=step.slug, tree=step.tree, after="", message="")
        lay_out(store, checkout.place, step.commit, step.tree, opened)
    place = checkout.shown(checkout.place)
    return Answer(
        [f"open at {step.slug} ({at + 1} of {len(state.steps)}): change files under {place}, then: mpatch refresh"],
        {"open": step.slug, "position": at + 1, "tree": place},
    )


def new(checkout: Checkout, slug: str, *, after: str = "", text: str = "") -> Answer:
    """Open an empty patch on top of the series, or after another one. Edits made on top already are kept."""
    if not SLUG.fullmatch(slug):
        raise UsageError(
            f"not a slug: {slug!r}",
            why="topic/name in lower case letters, digits and hyphens",
            remedy="mpatch new TOPIC/SLUG",
        )
    with working(checkout, "new"):
        state, series = open_tree(checkout)
        if slug in series.slugs():
            raise SeriesWrong(f"{slug} is in the series already", where="patches/series", remedy=f"mpatch edit {slug}")
        name = slug.partition("/")[2]
        text = text or TEMPLATE.format(subject=name.replace("-", " "), name=name.replace("-", "_"))
        message(text)  # refuses what could not be carried, before any work is put into it
        below = series.slugs()[series.index(after)] if after else (series.slugs() or [""])[-1]
        opened = replace(state, mode=NEW, slug=slug, after=below, message=text)
        if not after or below == series.slugs()[-1]:
            write_bytes(state_path(checkout.place), dump(opened).encode())
        else:
            store, step = checkout.store(), state.steps[series.index(below)]
            edits = differences(checkout.place, store.tree(state.tree))
            if edits:
                raise foreign(edits, checkout.shown(checkout.place))
            lay_out(store, checkout.place, step.commit, step.tree, replace(opened, tree=step.tree))
    place = checkout.shown(checkout.place)
    return Answer(
        [f"{slug} is open after {below or 'the base'}: change files under {place}, then: mpatch refresh"],
        {"open": slug, "after": below, "tree": place},
    )


def refresh(checkout: Checkout, slug: str = "", *, text: str = "") -> Answer:
    """Put the tree's changes into the open patch (or the named one) and rewrite all after it.

    Raises:
        NothingToRefresh: neither files nor message change.
        MoveConflict, WrongPlace, PatchAbsorbed: a later patch needs a person; the tree shows it.
    """
    with working(checkout, "refresh"):
        state, series = open_tree(checkout, modes=(APPLIED, EDIT, NEW))
        store = checkout.store()
        if state.mode != APPLIED and slug and series_name(series, slug, state) != state.slug:
            raise EditOpen(f"{state.mode} of {state.slug} is open, not {slug}", remedy="mpatch refresh")
        on_disk, edits = worktree_tree(store, checkout.place, state.tree)
        items = refreshed(store, state, series, slug, on_disk, text)
        if not edits and not text:
            raise NothingToRefresh(
                "the tree has no change",
                where=checkout.shown(checkout.place),
                remedy="change files there first, or give a new message with --message FILE",
            )
        return run_move(
            checkout, store, state, series, Move("refresh", state.base, state.base_tree, items, state, on_disk)
        )


def refresh_from_file(checkout: Checkout, slug: str) -> Answer:
    """Take a patch file that was edited by hand for what it says, and write it anew, with those after it.

    Its hunks must fit exactly on the tree below it; its ids and counts of lines may be wrong.

    Raises:
        ContextMismatch: they do not fit.
        TreeMissing: the tree was not made from this series, this patch aside.
    """
    with working(checkout, "refresh"):
        state, series, store = load_state(checkout.place), load_series(checkout, slug), checkout.store()
        at = series.index(slug)
        patch = series.patches[at]
        if state is None or state.mode != APPLIED or [step.slug for step in state.steps] != series.slugs():
            raise TreeMissing(
                "the tree does not hold this series", where=checkout.shown(checkout.place), remedy="mpatch apply"
            )
        edits = differences(checkout.place, store.tree(state.tree))
        if edits:
            raise foreign(edits, checkout.shown(checkout.place))
        items = items_of(series, state.stack())
        before = items[at].before
        items[at] = replace(items[at], after=store.change_tree(before, _by_hunks(store, patch, before)))
        plan = Move("refresh by file", state.base, state.base_tree, items, state, state.tree, patch.slug)
        return run_move(checkout, store, state, series, plan)


def _by_hunks(store: Store, patch: Patch, before: str) -> dict[str, tuple[str, bytes] | None]:
    found: dict[str, tuple[str, bytes] | None] = {}
    for change in patch.changes:
        entry = store.entry(before, change.path)
        new = apply_change(change, store.blob(entry.blob) if entry else b"", f"patches/{patch.slug}.patch")
        found[change.path] = (change.new_mode, new) if change.new_mode else None
    return found


def series_name(series: Series, slug: str, state: State) -> str:
    """Return the full slug, which may be the new patch's."""
    return slug if state.mode == NEW and slug == state.slug else series.slugs()[series.index(slug)]


def refreshed(store: Store, state: State, series: Series, slug: str, on_disk: str, text: str) -> list[Item]:
    """Return the plan in which one patch holds what is on disk."""
    items = items_of(series, state.stack())
    if state.mode == NEW:
        at = series.index(state.after) + 1 if state.after else 0
        said = signed(message(text or state.message))
        return [*items[:at], Item(state.slug, said, state.tree, on_disk), *items[at:]]
    if state.mode == APPLIED and not slug:
        raise NoEditOpen(
            "no patch is open",
            why="which one shall have the changes?",
            remedy="mpatch refresh SLUG, or first: mpatch new TOPIC/SLUG",
        )
    at = series.index(slug or state.slug)
    item, after = items[at], on_disk
    if state.mode == APPLIED:
        # The edits stand on top of the whole series: carry them down to their patch.
        merge = store.merge(state.tree, item.after, on_disk)
        if merge.conflicts:
            raise MoveConflict(
                f"the edits do not fit at {item.slug}",
                where=", ".join(merge.conflicts),
                why="a later patch changes the same lines",
                remedy=f"mpatch apply --save build/edits.diff, then: mpatch edit {item.slug}, and make the edits there",
            )
        after = merge.tree
    said = signed(message(text, date=item.message.date), item.message) if text else item.message
    return [*items[:at], Item(item.slug, said, item.before, after), *items[at + 1 :]]


def signed(said: Message, old: Message | None = None) -> Message:
    """Return the message with the author that its Signed-off-by names, else the old one's."""
    name, _, rest = said.trailer("Signed-off-by").partition(" <")
    if rest.endswith(">"):
        return replace(said, author=name, email=rest[:-1])
    return replace(said, author=old.author, email=old.email) if old else said


def drop(checkout: Checkout, slug: str, because: str) -> Answer:
    """Take a patch out of the series; the reason goes to the answer, and from there into the commit.

    Raises:
        SeriesWrong: a later patch depends on it.
        MoveConflict, WrongPlace, PatchAbsorbed: a later patch needs a person; the tree shows it.
    """
    with working(checkout, "drop"):
        state, series = open_tree(checkout)
        store, at = checkout.store(), series.index(slug)
        full = series.slugs()[at]
        needing = [patch.slug for patch in series.patches if full in patch.message.depends_on()]
        if needing:
            raise SeriesWrong(
                f"{full} is needed by {', '.join(needing)}",
                where="Depends-On",
                remedy=f"mpatch drop {needing[-1]} --because TEXT, or change its Depends-On first",
            )
        edits = differences(checkout.place, store.tree(state.tree))
        if edits:
            raise foreign(edits, checkout.shown(checkout.place))
        items = items_of(series, state.stack())
        items = items[:at] + items[at + 1 :]
        done = run_move(
            checkout, store, state, series, Move("drop", state.base, state.base_tree, items, state, state.tree)
        )
    return Answer(
        [
            f"dropped {full}: {because}",
            *done.lines,
            f'commit it with: git commit patches -m "Drop {full}: {because}"',
        ],
        {**done.data, "dropped": full, "because": because},
    )
