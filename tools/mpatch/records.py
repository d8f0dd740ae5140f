"""What other rooms read about the tree: build/pins.json and build/files.json."""

from __future__ import annotations

import json
from pathlib import Path

from tools.mpatch.checkout import Checkout
from tools.mpatch.files import write_bytes
from tools.mpatch.pins import Pins
from tools.mpatch.series import Series
from tools.mpatch.state import State
from tools.mpatch.store import Store


def write_records(checkout: Checkout, store: Store, pins: Pins, series: Series, state: State) -> list[Path]:
    """Write both files unless they are right already; return those written.

    pins.json is upstream.toml plus what is in the tree. files.json holds git's blob id of every file of the tree, for
    the guard that tells a patched module from another one (`megatron_ext/guard.py`, `mpatch doctor`).
    """
    known = {
        "version": pins.version(state.base),
        "base": state.base,
        "base_tree": state.base_tree,
        "patched_tree": state.tree,
        "series_digest": state.series_digest,
        "patches": series.slugs(),
    }
    files = {path: entry.blob for path, entry in store.tree(state.tree).items()}
    touched = sorted({change.path for patch in series.patches for change in patch.changes})
    pairs = (
        ("pins.json", {**pins.raw, **known}),
        ("files.json", {"schema": 1, "patched_tree": state.tree, "touched": touched, "files": files}),
    )
    wrote = []
    for name, values in pairs:
        path, data = checkout.build / name, (json.dumps(values, indent=1) + "\n").encode()
        if not path.is_file() or path.read_bytes() != data:
            write_bytes(path, data)
            wrote.append(path)
    return wrote
