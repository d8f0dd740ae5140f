"""Run something after a method of one object, where Megatron offers no module to hook.

The object gets a subclass of its own class that calls the original and then us. Unlike a function put on the instance
this survives a deep copy, and `isinstance` still holds. It is checked at start: a method that is gone or takes other
arguments is an error that names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron_ext.errors import UserError


def run_after(target: Any, method: str, num_arguments: int, observe: Callable[[Any], None]) -> None:
    """Call `observe(result)` after each `target.method(...)`; several may be put on one object.

    Args:
        target: The object whose class is replaced by a subclass.
        method: A method's name.
        num_arguments: How many positional arguments Megatron passes, without self.
        observe: Must not raise and must not change the result.

    Raises:
        UserError: The method isn't there or can't be called like that.
    """
    base = type(target)
    original = getattr(base, method, None)
    if not callable(original) or not _takes(original, num_arguments + 1):
        raise UserError(
            "observe: Megatron's call isn't what this version of the distribution was written for",
            where=f"{base.__module__}.{base.__qualname__}.{method}: looked for a method of {num_arguments} "
            + (f"arguments, found {inspect.signature(original)}" if callable(original) else "arguments, found none"),
            remedy="run with --moe-ext-observe-interval 0, and report the Megatron version",
        )

    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self is target:
            observe(result)
        return result

    target.__class__ = type(base.__name__, (base,), {method: observed, "__module__": base.__module__})


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True
