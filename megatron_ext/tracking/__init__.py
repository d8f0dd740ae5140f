"""The run directory's writer and reader, and its way into Trackio.

`RunWriter` is what training calls, `TeeSummaryWriter` is what Megatron takes for its TensorBoard writer, and
`rundir` reads the files back. Reading never imports torch or Trackio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.tracking.options import TrackingOptions, add_arguments
from megatron_ext.tracking.writer import RunWriter

if TYPE_CHECKING:
    from megatron_ext.tracking.tee import TeeSummaryWriter

__all__ = ["RunWriter", "TeeSummaryWriter", "TrackingOptions", "add_arguments"]


def __getattr__(name: str) -> object:
    # torch takes seconds to import and only training has it loaded anyway.
    if name == "TeeSummaryWriter":
        from megatron_ext.tracking.tee import TeeSummaryWriter

        return TeeSummaryWriter
    raise AttributeError(name)
