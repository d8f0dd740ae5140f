"""Run a plan to its end: write the moved series in one step, or wait for a person and go on afterwards."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tools.mpatch import readme
from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import (
    MoveConflict,
    MpatchError,
    NoEditOpen,
    PatchAbsorbed,
    PinsUnreadable,
    StateUnreadable,
    WrongPlace,
)
from tools.mpatch.files import commit_files, write_json
from tools.mpatch.message import Message
from tools.mpatch.output import Answer
from tools.mpatch.patchfile import render
from tools.mpatch.patchread import parse
from tools.mpatch.plan import ABSORBED, CONFLICT, EXACT, RESOLVED, Item, Moved, Stop, advance, patch_of
from tools.mpatch.records import write_records
from tools.mpatch.series import Series, load_series, render_order
from tools.mpatch.stack import build
from tools.mpatch.state import APPLIED, MOVE, State, dump, load_state
from tools.mpatch.state import parse as parse_state
from tools.mpatch.store import Store
from tools.mpatch.tree import foreign, lay_out, worktree_tree

MARKER = re.compile(rb"^(<<<<<<< |>>>>>>> )", re.MULTILINE)


@dataclass(frozen=True)
class Move:
    """A move under way: the plan, the tree it starts from, what is done, and where it waits."""

    kind: str
    base: str
    start: str
    items: list[Item]
    # What an abort goes back to: the state before, and the tree on disk, edits included.
    undo: State
    undo_tree: str
    # A patch to write anew even where nothing in it has changed.
    fresh: str = ""
    done: tuple[Moved, ...] = ()
    stop: Stop | None = None

    @property
    def running(self) -> str:
        """The tree that the next item is put on."""
        return self.done[-1].after if self.done else self.start


def run_move(
    checkout: Checkout, store: Store, state: State, series: Series, move: Move, *, drop_absorbed: bool = False
) -> Answer:
    """Put the rest of the plan on; finish, or wait for a person.

    Raises:
        MoveConflict, WrongPlace, PatchAbsorbed: the move waits; the tree shows the place.
    """
    rest = move.items[len(move.done) :]
    moved, stop = advance(store, rest, move.running, drop_absorbed=drop_absorbed)
    move = replace(move, done=(*move.done, *moved), stop=stop)
    if stop is not None:
        save(checkout, move)
        show_stop(checkout, store, state, move, stop)
        raise stopped(checkout, stop, move.kind)
    return finish(checkout, store, state, series, move)


def save(checkout: Checkout, move: Move) -> None:
    """Write the move down; from here on a kill loses nothing."""
    values = {
        "schema": 1, "kind": move.kind, "base": move.base, "start": move.start,
        "items": [item.plain() for item in move.items],
        "undo": dump(move.undo), "undo_tree": move.undo_tree, "fresh": move.fresh,
        "done": [asdict(one) for one in move.done],
        "stop": asdict(move.stop) if move.stop else None,
    }  # fmt: skip
    write_json(checkout.move_file, values)


def load(checkout: Checkout) -> Move:
    """Read the move that waits.

    Raises:
        NoEditOpen: none does.
        StateUnreadable: the file is damaged.
    """
    path = checkout.move_file
    if not path.exists():
        raise NoEditOpen("no rebase or refresh waits", remedy="mpatch rebase --onto BASE starts one")
    try:
        values = json.loads(path.read_text())
        stop = values["stop"]
        for key in ("paths", "was", "now"):
            stop[key] = tuple(stop[key])
        return Move(
            values["kind"],
            values["base"],
            values["start"],
            [Item.of(one) for one in values["items"]],
            parse_state(values["undo"]),
            values["undo_tree"],
            values["fresh"],
            tuple(Moved(**one) for one in values["done"]),
            Stop(**stop),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StateUnreadable(
            "the waiting move cannot be read",
            where=checkout.shown(path),
            why=str(error),
            remedy=f"nothing in patches/ was changed; rm {checkout.shown(path)}, then: mpatch apply",
        ) from None


def show_stop(checkout: Checkout, store: Store, state: State, move: Move, stop: Stop) -> None:
    """Lay out the tree that a person has to look at; HEAD is what is below the patch."""
    below = store.commit(move.running, f"Below {stop.slug}\n", None)
    waiting = replace(state, mode=MOVE, slug=stop.slug, tree=stop.tree, after="", message="")
    lay_out(store, checkout.place, below, stop.tree, waiting)


def stopped(checkout: Checkout, stop: Stop, kind: str) -> MpatchError:
    """Return the refusal for a move that waits."""
    place = checkout.shown(checkout.place)
    leave = "mpatch rebase --continue\nor leave it: mpatch rebase --abort"
    if stop.reason == CONFLICT:
        return MoveConflict(
            f"{stop.slug} does not fit any more",
            where=", ".join(f"{place}/{path}" for path in stop.paths),
            why="the new place and the patch change the same lines, or the file is gone",
            remedy=f"mend the marked lines, then: {leave}",
        )
    if stop.reason == ABSORBED:
        return PatchAbsorbed(
            f"{stop.slug} changes nothing any more: the new base has it",
            where=f"patches/{stop.slug}.patch",
            remedy="let it go: mpatch rebase --continue --drop-absorbed\nor leave it: mpatch rebase --abort",
        )
    return WrongPlace(
        f"{stop.slug} would land in another class or function",
        where=place,
        why=f"was {', '.join(stop.was)}\nnow {', '.join(stop.now)}",
        remedy=f"look at git -C {place} diff; move the lines or leave them, then: {leave}",
    )


def resume(checkout: Checkout, *, drop_absorbed: bool = False) -> Answer:
    """Take what is on disk as the answer and go on.

    Raises:
        MoveConflict: conflict markers are still there.
        PatchAbsorbed: the patch is empty now and `drop_absorbed` was not given.
    """
    move, series, store = load(checkout), load_series(checkout), checkout.store()
    state = load_state(checkout.place)
    stop = move.stop
    if state is None or stop is None:
        raise NoEditOpen("the tree is gone", where=checkout.shown(checkout.place), remedy="mpatch rebase --abort")
    if state.mode != MOVE or state.slug != stop.slug:
        # A kill came after the plan was written and before the tree was laid out.
        on_disk, edits = worktree_tree(store, checkout.place, state.tree)
        if edits and on_disk != move.undo_tree:
            raise foreign(edits, checkout.shown(checkout.place))
        show_stop(checkout, store, state, move, stop)
        raise stopped(checkout, stop, move.kind)
    on_disk, _ = worktree_tree(store, checkout.place, stop.tree)
    marked = _marked(store, move.running, on_disk)
    if marked:
        raise stopped(checkout, replace(stop, reason=CONFLICT, paths=tuple(marked)), move.kind)
    if on_disk == move.running and not drop_absorbed:
        raise stopped(checkout, replace(stop, reason=ABSORBED), move.kind)
    move = replace(move, done=(*move.done, Moved(stop.slug, move.running, on_disk, RESOLVED)), stop=None)
    return run_move(checkout, store, state, series, move, drop_absorbed=drop_absorbed)


def _marked(store: Store, below: str, on_disk: str) -> list[str]:
    changed = [(path, new.blob) for path, _, new in store.diff(below, on_disk) if new]
    contents = store.blobs(blob for _, blob in changed)
    return [path for path, blob in changed if MARKER.search(contents[blob])]


def abort(checkout: Checkout) -> Answer:
    """Leave the move; patches/ was not touched, and the tree gets the old series back."""
    move, store = load(checkout), checkout.store()
    stack, undo = move.undo.stack(), move.undo
    heads = {step.tree: step.commit for step in undo.steps}
    lay_out(store, checkout.place, heads.get(undo.tree, stack.base_commit), move.undo_tree, undo)
    checkout.move_file.unlink()
    edited = "" if undo.tree == move.undo_tree else ", your edits included"
    return Answer([f"left; series and tree are as before{edited}"], {"aborted": True})


def finish(checkout: Checkout, store: Store, state: State, series: Series, move: Move) -> Answer:
    """Write the moved series in one step and lay the whole tree out."""
    kept = [(item, one) for item, one in zip(move.items, move.done, strict=True) if one.before != one.after]
    gone = [one.slug for one in move.done if one.before == one.after]
    made = _patches(store, state, series, kept, gone, move.fresh)
    contents: dict[str, bytes | None] = {f"patches/{slug}.patch": None for slug in series.slugs()}
    contents |= {f"patches/{patch.slug}.patch": data for patch, data in zip(made.patches, made.data, strict=True)}
    order = (checkout.patches / "series").read_text(encoding="utf-8")
    contents["patches/series"] = render_order(order, made.slugs()).encode()
    contents["patches/README.md"] = readme.readme(made).encode()
    contents["upstream.toml"] = with_default(checkout.pins_file.read_bytes(), move.base)
    changed = {name: data for name, data in contents.items() if _content(checkout.root / name) != data}
    stack = build(store, move.start, made.patches)  # proves each blob before anything is written
    _nothing_lost(move, stack.tree)
    # The plan goes in the same step: a kill leaves either a waiting move or a finished one.
    plan = str(checkout.move_file.relative_to(checkout.root))
    commit_files(checkout.journal, checkout.root, {**changed, plan: None})
    applied = State(move.base, move.start, stack.base_commit, stack.tree, made.digest(move.start), stack.steps)
    lay_out(store, checkout.place, stack.commit, stack.tree, applied)
    write_records(checkout, store, checkout.pins(), made, applied)
    lines = [f"wrote {name}" for name in sorted(changed)] + [f"absorbed, dropped: {slug}" for slug in gone]
    how = {one.slug: one.how for one in move.done}
    if move.kind == "rebase":
        lines += _range_diff(store, state, applied)
    return Answer(lines, {"wrote": sorted(changed), "absorbed": gone, "how": how, "base": move.base})


def _nothing_lost(move: Move, tree: str) -> None:
    """Edits made on top of the whole series must come back exactly, unless a person settled a conflict."""
    by_hand = any(one.how == RESOLVED for one in move.done)
    if move.kind == "refresh" and move.undo.mode == APPLIED and tree != move.undo_tree and not by_hand:
        raise MoveConflict(
            "the edits would not come back as they are",
            why=f"on disk {move.undo_tree}\nseries  {tree}",
            remedy="mpatch apply --save build/edits.diff, then: mpatch edit SLUG, and make the edits there",
        )


def _patches(
    store: Store,
    state: State,
    series: Series,
    kept: Sequence[tuple[Item, Moved]],
    gone: list[str],
    fresh: str,
) -> Series:
    old = {patch.slug: (patch, data) for patch, data in zip(series.patches, series.data, strict=True)}
    after = {step.slug: step.tree for step in state.steps}
    patches, bytes_of = [], []
    for item, one in kept:
        said = without_needs(item.message, gone)
        known = old.get(item.slug)
        same = known is not None and known[0].message == said and after.get(item.slug) == item.after
        if known is not None and same and one.how == EXACT and item.slug != fresh:
            data = known[1]
        else:
            data = render(patch_of(store, item.slug, said, one.before, one.after))
        patches.append(parse(item.slug, data))  # what cannot be read back is never written
        bytes_of.append(data)
    return Series(tuple(patches), tuple(bytes_of))


def without_needs(said: Message, gone: list[str]) -> Message:
    """Return the message without the dropped patches in its Depends-On."""
    needs = said.depends_on()
    if not set(needs) & set(gone):
        return said
    left = ", ".join(slug for slug in needs if slug not in gone) or "none"
    return replace(said, trailers=tuple((key, left if key == "Depends-On" else value) for key, value in said.trailers))


def with_default(pins: bytes, name: str) -> bytes:
    r"""Return upstream.toml with another default base, everything else as it was.

    Raises:
        PinsUnreadable: the line is written in a way that is not understood here.

    >>> with_default(b"schema = 1\ndefault_base='a' # why\n", "b")
    b'schema = 1\ndefault_base = "b" # why\n'
    """
    line = rb"""(?m)^default_base[ \t]*=[ \t]*("[^"\n]*"|'[^'\n]*')"""
    made = re.sub(line, b'default_base = "%s"' % name.encode(), pins, count=1)
    if tomllib.loads(made.decode()).get("default_base") != name:
        raise PinsUnreadable(
            "the default base cannot be changed",
            where="upstream.toml",
            why="no line of its own sets default_base",
            remedy=f'write the line: default_base = "{name}", above the first table, then run this again',
        )
    return made


def _range_diff(store: Store, old: State, new: State) -> list[str]:
    answer = store.repo.run(
        "range-diff",
        "--no-color",
        f"{old.base_commit}..{old.stack().commit}",
        f"{new.base_commit}..{new.stack().commit}",
    )
    return ["range diff (old series, new series):", *answer.text().split("\n")]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
