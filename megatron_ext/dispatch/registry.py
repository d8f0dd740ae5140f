"""The flex backends that are not upstream's, by name. Patched Megatron calls `build_manager` for every name it doesn't
know itself (patches/dispatch/flex-registry.patch).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.dispatch.errors import DispatchError

UPSTREAM = ("deepep", "hybridep", "ncclep")
Factory = Callable[[Any], Any]


def _rows(two_hops: bool) -> Factory:
    def build(dispatcher: Any) -> Any:
        from megatron_ext.dispatch.megatron import RowManager

        return RowManager(dispatcher, two_hops=two_hops)

    return build


def _deepep_any(dispatcher: Any) -> Any:
    from megatron_ext.dispatch.deepep_manager import DeepEPManager

    return DeepEPManager(dispatcher)


_factories: dict[str, Factory] = {"dedup": _rows(False), "twohop": _rows(True), "deepep_any": _deepep_any}


def register(name: str, factory: Factory) -> None:
    """Add a backend: a function of Megatron's flex dispatcher that returns a manager.

    The name must also stand in the choices of `--moe-flex-dispatcher-backend`, or be set on the config directly.
    """
    _factories[name] = factory


def names() -> tuple[str, ...]:
    """The registered names."""
    return tuple(_factories)


def build_manager(dispatcher: Any) -> Any:
    """Build the manager that `dispatcher.config.moe_flex_dispatcher_backend` names.

    Args:
        dispatcher: Megatron's `MoEFlexTokenDispatcher`, its groups and sizes set.

    Raises:
        DispatchError: nobody has registered that name.
    """
    name = dispatcher.config.moe_flex_dispatcher_backend
    if name not in _factories:
        raise DispatchError(
            "no such backend of the flex dispatcher",
            where=f"--moe-flex-dispatcher-backend {name}",
            remedy=f"choose one of {', '.join((*UPSTREAM, *_factories))}",
            exit_code=64,
        )
    return _factories[name](dispatcher)
