"""What an earlier command left: which base and series the patched tree holds, and whether an edit is open."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.mpatch.errors import StateUnreadable
from tools.mpatch.stack import Stack, Step

FILE = "mpatch.json"
APPLIED, EDIT, NEW, MOVE = "applied", "edit", "new", "move"


@dataclass(frozen=True)
class State:
    """The state of a patched tree, kept in its .git, so that it appears and goes with the files it describes.

    `tree` is what the files were when the tree was laid out. `mode` is applied, edit (open at `slug`), new (an empty
    patch `slug` is open; `message` is its text, `after` its predecessor) or move (a rebase waits at `slug`).
    """

    base: str
    base_tree: str
    base_commit: str
    tree: str
    series_digest: str
    steps: tuple[Step, ...]
    mode: str = APPLIED
    slug: str = ""
    after: str = ""
    message: str = ""

    def stack(self) -> Stack:
        """Return base and steps as a stack."""
        return Stack(self.base_tree, self.base_commit, self.steps)


def state_path(place: Path) -> Path:
    """Return where a tree keeps its state."""
    return place / ".git" / FILE


def dump(state: State) -> str:
    """Return the state as JSON text."""
    return json.dumps({"schema": 1, **asdict(state)}, indent=1) + "\n"


def load_state(place: Path) -> State | None:
    """Return the state of a tree, None when there is no tree at all.

    Raises:
        StateUnreadable: something lies there that mpatch did not make, or an unknown schema.
    """
    if not place.exists():
        return None
    path = state_path(place)
    try:
        return parse(path.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateUnreadable(
            "this folder was not made by this mpatch",
            where=str(place),
            why=f"{path}: {error}",
            remedy="move it away, or replace it: mpatch apply --discard",
        ) from None


def parse(text: str) -> State:
    """Read what `dump` wrote; ValueError, KeyError or TypeError when it is something else."""
    values = json.loads(text)
    if values.pop("schema") != 1:
        raise ValueError("another schema")
    values["steps"] = tuple(Step(**step) for step in values["steps"])
    return State(**values)
