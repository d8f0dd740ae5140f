"""The pins in force, as `mpatch apply` recorded them (or as the wheel carries them)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError

_PACKAGED = Path(__file__).with_name("_pins.json")
_CHECKOUT = Path(__file__).resolve().parent.parent / "build" / "pins.json"


def load_pins() -> dict[str, Any]:
    """Return upstream.toml's content plus version, base, base_tree, patched_tree, series_digest and patches (in order).

    Raises:
        UserError: Nothing was applied yet.
    """
    for path in (_PACKAGED, _CHECKOUT):
        if path.is_file():
            pins: dict[str, Any] = json.loads(path.read_text())
            return pins
    raise UserError("the patched Megatron was not built", where=str(_CHECKOUT), remedy="run `make setup`")
