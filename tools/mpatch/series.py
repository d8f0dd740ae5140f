"""patches/series and the files that it names, in order."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from tools.mpatch import patchread
from tools.mpatch.checkout import Checkout
from tools.mpatch.errors import MpatchError, SeriesDoesNotApply, SeriesWrong
from tools.mpatch.patchfile import Patch

SLUG = re.compile(r"[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9-]*")
FORMAT = "mpatch 1"  # part of the digest: a new way of applying makes old trees stale


@dataclass(frozen=True)
class Series:
    """The patches in order, with the bytes of their files."""

    patches: tuple[Patch, ...]
    data: tuple[bytes, ...]

    def slugs(self) -> list[str]:
        """Return the slugs in order."""
        return [patch.slug for patch in self.patches]

    def index(self, slug: str) -> int:
        """Return where a patch stands; its name without the topic is enough where that is unique.

        Raises:
            SeriesWrong: there is none, or several.
        """
        slugs = self.slugs()
        found = [at for at, one in enumerate(slugs) if slug in (one, one.partition("/")[2])]
        if len(found) == 1:
            return found[0]
        raise SeriesWrong(
            f"no patch {slug!r}" if not found else f"{slug!r} names {len(found)} patches",
            where="patches/series",
            why=f"the series: {', '.join(slugs) or 'is empty'}",
            remedy="mpatch list",
        )

    def digest(self, base_tree: str) -> str:
        """Return what identifies base and series together."""
        words = [FORMAT, base_tree]
        words += [
            f"{patch.slug} {hashlib.sha256(data).hexdigest()}"
            for patch, data in zip(self.patches, self.data, strict=True)
        ]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()


def parse_order(text: str, name: str = "patches/series") -> list[str]:
    r"""Return the slugs of a series file; empty lines and comments are skipped.

    Raises:
        SeriesWrong: a line is no slug, or stands there twice.

    >>> parse_order("# first\nruntime/model-built\n\nmoe/count # why\n")
    ['runtime/model-built', 'moe/count']
    """
    found: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        slug = line.partition("#")[0].strip()
        if not slug:
            continue
        if not SLUG.fullmatch(slug):
            raise SeriesWrong(
                f"not a slug: {slug!r}",
                where=f"{name}:{number}",
                why="a slug is topic/name in lower "
                "case letters, digits and hyphens, without .patch and without a number in front",
                remedy="mend the line",
            )
        if slug in found:
            raise SeriesWrong(
                f"{slug} stands there twice", where=f"{name}:{number}", remedy="remove one of the two lines"
            )
        found.append(slug)
    return found


def load_series(checkout: Checkout, mend: str = "") -> Series:
    """Read the series and every patch of it; the one called `mend` leniently.

    Raises:
        SeriesWrong: the series file is missing (an empty one is fine), or it and the folder disagree.
        SeriesDoesNotApply: several patch files cannot be read; one alone raises its own error.
    """
    path = checkout.patches / "series"
    if not path.is_file():
        raise SeriesWrong(
            "the series is missing",
            where=str(path),
            why="a missing series must not look like one of zero patches",
            remedy="git checkout -- patches",
        )
    try:
        slugs = parse_order(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise SeriesWrong(
            "the series is not UTF-8",
            where="patches/series",
            why=str(error),
            remedy="save it as UTF-8, or: git checkout -- patches/series",
        ) from None
    on_disk = {str(file.relative_to(checkout.patches))[: -len(".patch")] for file in checkout.patches.rglob("*.patch")}
    missing, stray = [slug for slug in slugs if slug not in on_disk], sorted(on_disk - set(slugs))
    if missing or stray:
        lines = [f"named, but no file: {slug}" for slug in missing] + [f"file, but not named: {slug}" for slug in stray]
        raise SeriesWrong(
            "patches/series and the files disagree",
            where="patches/series",
            why="\n".join(lines),
            remedy="add or remove the lines; a patch leaves with: mpatch drop SLUG --because TEXT",
        )
    data = [(checkout.patches / f"{slug}.patch").read_bytes() for slug in slugs]
    patches, errors = [], []
    for slug, content in zip(slugs, data, strict=True):
        try:
            patches.append(patchread.parse(slug, content, mend=bool(mend) and mend in (slug, slug.partition("/")[2])))
        except MpatchError as error:
            errors.append(error)
    raise_all(errors, "patch files cannot be read")
    return Series(tuple(patches), tuple(data))


def raise_all(errors: list[MpatchError], what: str) -> None:
    """Raise the only error as it is, several as one that lists them all, none not at all."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise SeriesDoesNotApply(
            f"{len(errors)} {what}",
            why="\n".join(
                f"{error.what} [{type(error).__name__}]\n  {error.where}\n  " + error.why.replace("\n", "\n  ")
                for error in errors
            ),
            remedy=errors[0].remedy,
        )


def render_order(old_text: str, slugs: list[str]) -> str:
    r"""Return the series file with these slugs, keeping its comments where their patch still follows.

    >>> render_order("# top\n\na/x\n# about y\na/y\n", ["a/z", "a/y"])
    '# top\n\na/z\n# about y\na/y\n'
    """
    head: list[str] = []
    above: dict[str, list[str]] = {}
    pending: list[str] = []
    lines_of: dict[str, str] = {}
    for line in old_text.splitlines():
        slug = line.partition("#")[0].strip()
        if slug:
            if not above and pending:
                # The first comment block that an empty line closes belongs to the file, not to the first patch.
                cut = max((at + 1 for at, text in enumerate(pending) if not text.strip()), default=0)
                head, pending = pending[:cut], pending[cut:]
            above[slug], pending, lines_of[slug] = pending, [], line
        else:
            pending.append(line)
    if not above:
        head, pending = pending, []
    out = list(head)
    for slug in slugs:
        out += [*above.get(slug, []), lines_of.get(slug, slug)]
    return "\n".join(out + pending) + "\n"
