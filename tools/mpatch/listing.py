"""list and show: the series as a table, one patch as it is."""

from __future__ import annotations

from tools.mpatch import lint, readme
from tools.mpatch.checkout import Checkout
from tools.mpatch.files import write_bytes
from tools.mpatch.output import Answer
from tools.mpatch.series import load_series


def list_(checkout: Checkout, write_readme: bool = False) -> Answer:
    """Return the series in order, with sizes and states."""
    series = load_series(checkout)
    rows = [
        {
            "slug": patch.slug,
            "subject": patch.message.subject,
            "added": patch.added(),
            "removed": patch.removed(),
            "hunks": patch.hunks(),
            "files": [change.path for change in patch.changes],
            **dict(patch.message.trailers),
        }
        for patch in series.patches
    ]
    width = max((len(str(row["slug"])) for row in rows), default=0)
    lines = [
        f"{number:>3} {row['slug']:<{width}}  +{row['added']:<3} -{row['removed']:<3} "
        f"{row.get('Upstream-Status', '-')!s:<12.12}  {row['subject']}"
        for number, row in enumerate(rows, 1)
    ]
    lines.append(
        f"{len(rows)} patches, +{sum(patch.added() for patch in series.patches)} lines, "
        f"{sum(patch.hunks() for patch in series.patches)} hunks"
    )
    use = lint.budget_use(series, checkout.pins().budget)
    lines += [f"budget: {name} {used} of {limit}{'  EXCEEDED' if used > limit else ''}" for name, used, limit in use]
    if write_readme:
        write_bytes(checkout.patches / "README.md", readme.readme(series).encode())
        lines.append("wrote patches/README.md")
    return Answer(
        lines, {"patches": rows, "budget": {name: {"used": used, "limit": limit} for name, used, limit in use}}
    )


def show(checkout: Checkout, slug: str, message_only: bool = False) -> Answer:
    """Return one patch, or its message alone."""
    series = load_series(checkout)
    at = series.index(slug)
    patch = series.patches[at]
    text = patch.message.text() if message_only else series.data[at].decode("utf-8", "replace")
    return Answer(
        [text.rstrip("\n")],
        {
            "slug": patch.slug,
            "position": at + 1,
            "text": text,
            "files": [change.path for change in patch.changes],
        },
    )
