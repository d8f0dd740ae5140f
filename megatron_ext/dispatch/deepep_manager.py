"""DeepEP behind one adapter: not built yet, refused by name."""

from __future__ import annotations

from typing import Any

from megatron_ext.dispatch.errors import DispatchError


class DeepEPManager:
    """Stands in for the adapter."""

    def __init__(self, dispatcher: Any) -> None:
        """Refuse."""
        raise DispatchError(
            "the DeepEP adapter is not built yet",
            where="--moe-flex-dispatcher-backend deepep_any",
            remedy="use twohop, dedup, or upstream's deepep",
            exit_code=64,
        )
