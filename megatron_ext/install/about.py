"""`megatron-moe --version`: the pin, the tree, the series. Standard library only, so that it answers anywhere."""

from __future__ import annotations

from typing import Any

from megatron_ext.pins import load_pins


def about_record() -> dict[str, Any]:
    """Return version, pin, trees, series digest and patches as plain values.

    `pin` is the table of upstream.toml for the base in force; `base_tree` and `patched_tree` are git tree ids of all
    files before and after the patches; `series_digest` is the sha256 that names base and patches together.

    Raises:
        UserError: nothing was applied yet.
    """
    pins = load_pins()
    names = ("version", "base", "base_tree", "patched_tree", "series_digest", "patches")
    record = {name: pins[name] for name in names if name in pins}
    return {**record, "pin": pins["bases"][pins["base"]]}


def about_lines() -> list[str]:
    """Return the same for people.

    Raises:
        UserError: nothing was applied yet.
    """
    record = about_record()
    pin = record["pin"]
    if pin["kind"] == "sdist":
        upstream = f"{pin['package']} {pin['version']}, sha256 {pin['sha256']}"
    else:
        upstream = f"{pin['repository']} {pin['commit']}"
    patches = record["patches"]
    return [
        f"megatron-moe {record.get('version', 'unknown')}",
        f"  pin            {record['base']}: {upstream}",
        f"  base tree      {record['base_tree']}",
        f"  patched tree   {record['patched_tree']}",
        f"  series digest  {record['series_digest']}",
        f"  patches        {len(patches)}",
        *(f"    {number:>3} {slug}" for number, slug in enumerate(patches, 1)),
    ]
