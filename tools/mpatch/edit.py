"""new, edit, refresh, drop: change the series through the tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tools.mpatch import readme
from tools.mpatch.apply import working, write_pins
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
from tools.mpatch.files import commit_files, write_bytes
from tools.mpatch.message import TRAILERS, Message, message
from tools.mpatch.output import Answer
from tools.mpatch.patchfile import Patch, parse, render
from tools.mpatch.plan import ABSORBED, EXACT, Item, Moved, Stop, advance, items_of, patch_of
from tools.mpatch.series import SLUG, Series, load_series, render_order
from tools.mpatch.stack import build
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
        raise EditOpen(
            "a rebase or refresh waits", remedy="mpatch rebase --continue, or: mpatch rebase --abort"
        )
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
        [
            f"open at {step.slug} ({at + 1} of {len(state.steps)}): change files under {place}, then: mpatch refresh"
        ],
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
            raise SeriesWrong(
                f"{slug} is in the series already", where="patches/series", remedy=f"mpatch edit {slug}"
            )
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
        MoveConflict: a later patch does not fit any more; nothing is written.
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
        moved, stop = advance(store, items, state.base_tree)
        if stop is not None:
            raise stopped(stop)
        wrote = finish(checkout, store, state, series, items, moved)
    return Answer([f"wrote {name}" for name in wrote], {"wrote": wrote})


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
                remedy="mpatch apply --save build/edits.diff, "
                f"then: mpatch edit {item.slug}, and make the edits there",
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


def stopped(stop: Stop) -> MoveConflict:
    """Return the refusal for a move that needs a person."""
    if stop.reason == ABSORBED:
        return MoveConflict(
            f"{stop.slug} would change nothing any more", remedy=f"mpatch drop {stop.slug} --because TEXT"
        )
    why = (
        f"was {', '.join(stop.was)}\nnow {', '.join(stop.now)}" if stop.was else "both change the same lines"
    )
    return MoveConflict(
        f"{stop.slug} does not fit on the changed patch",
        where=", ".join(stop.paths),
        why=why,
        remedy=f"change it so that {stop.slug} still fits, or put the change after it: mpatch new",
    )


def finish(
    checkout: Checkout,
    store: Store,
    state: State,
    series: Series,
    items: list[Item],
    moved: list[Moved],
    also: dict[str, bytes | None] | None = None,
) -> list[str]:
    """Write the moved series in one step and lay the whole tree out; return the files written."""
    old = {patch.slug: data for patch, data in zip(series.patches, series.data, strict=True)}
    messages = {patch.slug: patch.message for patch in series.patches}
    patches: list[Patch] = []
    contents: dict[str, bytes | None] = {f"patches/{slug}.patch": None for slug in old}
    for item, one in zip(items, moved, strict=True):
        name = f"patches/{item.slug}.patch"
        if one.how == EXACT and one.after == item.after and _unchanged(series, item, messages, state):
            data = old[item.slug]
        else:
            data = render(patch_of(store, item.slug, item.message, one.before, one.after))
        patches.append(parse(item.slug, data))  # what cannot be read back is never written
        contents[name] = data
    made = Series(tuple(patches), tuple(data for data in contents.values() if data is not None))
    made = Series(made.patches, tuple(contents[f"patches/{slug}.patch"] or b"" for slug in made.slugs()))
    order = checkout.patches / "series"
    contents["patches/series"] = render_order(order.read_text(encoding="utf-8"), made.slugs()).encode()
    contents["patches/README.md"] = readme.readme(made).encode()
    contents |= also or {}
    changed = {name: data for name, data in contents.items() if _content(checkout.root / name) != data}
    base_tree = moved[0].before if moved else state.base_tree
    stack = build(store, base_tree, made.patches)  # proves each blob before anything is written
    commit_files(checkout.journal, checkout.root, changed)
    applied = State(state.base, base_tree, stack.base_commit, stack.tree, made.digest(base_tree), stack.steps)
    lay_out(store, checkout.place, stack.commit, stack.tree, applied)
    write_pins(checkout, checkout.pins(), made, applied)
    return sorted(changed)


def _unchanged(series: Series, item: Item, messages: dict[str, Message], state: State) -> bool:
    if messages.get(item.slug) != item.message:
        return False
    step = state.steps[series.slugs().index(item.slug)]
    return step.tree == item.after


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def drop(checkout: Checkout, slug: str, because: str) -> Answer:
    """Take a patch out of the series; the reason goes to the answer, and from there into the commit.

    Raises:
        SeriesWrong: a later patch depends on it.
        MoveConflict: a later patch does not fit without it.
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
        moved, stop = advance(store, items, state.base_tree)
        if stop is not None:
            raise stopped(stop)
        wrote = finish(checkout, store, state, series, items, moved)
    return Answer(
        [
            f"dropped {full}: {because}",
            *(f"wrote {name}" for name in wrote),
            f'commit it with: git commit patches -m "Drop {full}: {because}"',
        ],
        {"dropped": full, "because": because, "wrote": wrote},
    )


def missing_trailers(said: Message) -> list[str]:
    """Return the mandatory trailers that a message lacks."""
    return [key for key in TRAILERS if not said.trailer(key)]
