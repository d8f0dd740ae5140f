"""upstream.toml: the only place that reads it. Every pinned value of the distribution comes from here."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.mpatch.errors import BaseMissing, PinsUnreadable

SCOPES = ("sdist", "git")


@dataclass(frozen=True)
class SdistBase:
    """A source distribution on a package index: named by file, proven by size, sha256 and tree id."""

    name: str
    package: str
    version: str
    filename: str
    size_bytes: int
    sha256: str
    tree: str
    scope: str = "sdist"
    kind: str = "sdist"

    def describe(self) -> str:
        """Return the base in a few words."""
        return f"{self.package} {self.version} (sdist)"


@dataclass(frozen=True)
class GitBase:
    """A commit of a git repository; `tree` is empty until someone with network access has recorded it."""

    name: str
    repository: str
    commit: str
    tree: str = ""
    url: str = ""
    scope: str = "git"
    kind: str = "git"

    def describe(self) -> str:
        """Return the base in a few words."""
        return f"{self.repository} {self.commit[:12]} (git)"


Base = SdistBase | GitBase


@dataclass(frozen=True)
class Budget:
    """How large the series may grow; CI fails beyond it. Zero hot touches means none at all."""

    patches: int = 40
    added_lines: int = 600
    added_lines_per_patch: int = 60
    hunks: int = 120
    # Files that upstream changes all the time, with the hunks that the whole series may have in each.
    hot_files: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Pins:
    """The whole of upstream.toml. `raw` is the file as plain values, for build/pins.json."""

    path: Path
    default_base: str
    bases: Mapping[str, Base]
    packages: Mapping[str, str]
    budget: Budget
    raw: Mapping[str, Any]
    number: int = 0

    def version(self, base_name: str = "") -> str:
        """Return the distribution's version on a base: upstream's release, then our number.

        A commit has no release number and sorts before every release: `0+moe.1.gd6316eb45bf1`.

        Raises:
            BaseMissing: upstream.toml has no such base.
        """
        base = self.base(base_name)
        if isinstance(base, SdistBase):
            return f"{base.version}+moe.{self.number}"
        return f"0+moe.{self.number}.g{base.commit[:12]}"

    def base(self, name: str = "") -> Base:
        """Return the base called `name` (the default one when empty).

        Raises:
            BaseMissing: upstream.toml has no such base.
        """
        wanted = name or self.default_base
        found = self.bases.get(wanted)
        if found is None:
            raise BaseMissing(
                f"there is no base {wanted!r}",
                where=str(self.path),
                why=f"bases that are there: {', '.join(sorted(self.bases)) or 'none'}",
                remedy=f"add a table [bases.{wanted}], or name one that is there with --base",
            )
        return found


def load_pins(path: Path) -> Pins:
    """Read upstream.toml.

    Raises:
        PinsUnreadable: the file is missing, is not TOML, or a field is missing or of the wrong form.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PinsUnreadable("the pins are missing", where=str(path), remedy="git checkout -- upstream.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PinsUnreadable(
            "the pins are not valid TOML",
            where=str(path),
            why=str(error),
            remedy="mend the named line, or: git checkout -- upstream.toml",
        ) from None
    if raw.get("schema") != 1:
        raise PinsUnreadable(
            "the pins have an unknown schema",
            where=str(path),
            why=f"schema is {raw.get('schema')!r}, this mpatch reads 1",
            remedy="update the checkout, tools/ and upstream.toml belong together",
        )
    bases = {name: _base(path, name, table) for name, table in raw.get("bases", {}).items()}
    number = raw.get("distribution", {}).get("number", 0)
    if not isinstance(number, int) or number < 0:
        raise PinsUnreadable(
            "the distribution's number has the wrong form",
            where=f"{path} [distribution]",
            why=f"number is {number!r}",
            remedy="write a whole number from 0 on; it stands behind upstream's version",
        )
    budget = raw.get("budget", {})
    try:
        limits = Budget(**budget)
    except TypeError as error:
        raise PinsUnreadable(
            "unknown field",
            where=f"{path} [budget]",
            why=str(error),
            remedy="see Budget in tools/mpatch/pins.py for the fields",
        ) from None
    return Pins(
        path=path,
        default_base=str(raw.get("default_base", "")),
        bases=bases,
        packages=dict(raw.get("packages", {})),
        budget=limits,
        raw=raw,
        number=number,
    )


def _base(path: Path, name: str, table: Mapping[str, Any]) -> Base:
    where = f"{path} [bases.{name}]"
    kind = table.get("kind")
    made: Base
    try:
        if kind == "sdist":
            made = SdistBase(
                name=name,
                package=table["package"],
                version=table["version"],
                filename=table["filename"],
                size_bytes=int(table["size_bytes"]),
                sha256=table["sha256"],
                tree=table["tree"],
                scope=table.get("scope", "sdist"),
            )
            _form(where, "sha256", made.sha256, r"[0-9a-f]{64}")
            _form(where, "tree", made.tree, r"[0-9a-f]{40}")
            _form(where, "filename", made.filename, r"[A-Za-z0-9][A-Za-z0-9._+-]*\.tar\.gz")
        elif kind == "git":
            made = GitBase(
                name=name,
                repository=table["repository"],
                commit=table["commit"],
                tree=table.get("tree", ""),
                url=table.get("url", ""),
                scope=table.get("scope", "git"),
            )
            # Abbreviated ids and branch names move; only a full id is a pin.
            _form(where, "commit", made.commit, r"[0-9a-f]{40}")
            _form(where, "tree", made.tree, r"([0-9a-f]{40})?")
        else:
            raise PinsUnreadable(
                "unknown kind of base",
                where=where,
                why=f"kind is {kind!r}",
                remedy='use kind = "sdist" or kind = "git"',
            )
    except KeyError as error:
        raise PinsUnreadable(
            "a field is missing",
            where=where,
            why=f"no {error}",
            remedy=f"write {error.args[0]} = ... into the table",
        ) from None
    if made.scope not in SCOPES:
        raise PinsUnreadable(
            "unknown scope", where=where, why=f"scope is {made.scope!r}", remedy=f"one of {', '.join(SCOPES)}"
        )
    return made


def _form(where: str, field_name: str, value: object, pattern: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise PinsUnreadable(
            f"{field_name} has the wrong form",
            where=where,
            why=f"{value!r} does not match {pattern}",
            remedy=f"write the full {field_name}; short ids and names are no pins",
        )
