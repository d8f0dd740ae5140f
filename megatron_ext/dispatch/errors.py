"""The error of this room: a dispatch that cannot be done, or that went wrong, with the rank and the
numbers met."""

from __future__ import annotations

from megatron_ext.errors import UserError


class DispatchError(UserError):
    """A dispatcher was asked for something it cannot do, or the ranks disagree about what they exchange."""
