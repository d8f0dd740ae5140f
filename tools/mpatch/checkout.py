"""Where things are in a checkout. Paths are given, never discovered at import."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tools.mpatch.errors import InstalledPackage, UsageError
from tools.mpatch.pins import Pins, load_pins
from tools.mpatch.store import Store


@dataclass(frozen=True)
class Checkout:
    """A checkout of the distribution. `place` is the patched tree, normally build/megatron."""

    root: Path

    @property
    def pins_file(self) -> Path:
        """upstream.toml."""
        return self.root / "upstream.toml"

    @property
    def patches(self) -> Path:
        """The folder of the series."""
        return self.root / "patches"

    @property
    def build(self) -> Path:
        """Everything that can be made again."""
        return self.root / "build"

    @property
    def place(self) -> Path:
        """The patched tree."""
        return self.build / "megatron"

    @property
    def own(self) -> Path:
        """mpatch's own files under build/."""
        return self.build / "mpatch"

    @property
    def journal(self) -> Path:
        """The plan of a change to several files."""
        return self.own / "journal.json"

    @property
    def lock(self) -> Path:
        """Held by every verb that writes."""
        return self.own / "lock"

    @property
    def move_file(self) -> Path:
        """The state of a rebase or refresh that waits for a person."""
        return self.own / "move.json"

    @property
    def cache(self) -> Path:
        """Downloads; several checkouts may share one through MPATCH_CACHE."""
        return Path(os.environ.get("MPATCH_CACHE") or self.build / "cache")

    def pins(self) -> Pins:
        """Read upstream.toml."""
        return load_pins(self.pins_file)

    def store(self, alternates: tuple[Path, ...] = ()) -> Store:
        """Open the object store of this checkout."""
        return Store.open(self.own / "store.git", alternates)

    def shown(self, path: Path) -> str:
        """Return a path as a person standing in the checkout types it."""
        return os.path.relpath(path, self.root) if path.is_relative_to(self.root) else str(path)


def find_checkout(given: str | None) -> Checkout:
    """Return the checkout: the one given, the one around the current folder, or the one that holds this file.

    Raises:
        UsageError: none of them has an upstream.toml.
        InstalledPackage: it lies in an installed environment.
    """
    here = Path.cwd()
    candidates = [Path(given)] if given else [here, *here.parents, Path(__file__).resolve().parents[2]]
    for folder in candidates:
        if (folder / "upstream.toml").is_file():
            refuse_installed(folder.resolve())
            return Checkout(folder.resolve())
    raise UsageError(
        "no checkout here",
        where=str(candidates[0]),
        why="no upstream.toml there",
        remedy="cd into the checkout, or name it with --root",
    )


def refuse_installed(path: Path) -> None:
    """Refuse to work in an installed environment: uv links its files from a cache that all projects share.

    Raises:
        InstalledPackage: the path lies in site-packages.
    """
    if {"site-packages", "dist-packages"} & set(path.parts):
        raise InstalledPackage(
            "installed packages are never edited",
            where=str(path),
            why="uv and pip link files from a shared cache; an edit there reaches every project",
            remedy="clone the distribution and run mpatch in the clone",
        )
