"""Metrics and alarms from routing maps, logits and expert outputs (docs/architecture.md).

`Monitor.from_args(args, sink)`, `attach(model_chunks)`, `step_end(iteration)` on all ranks; `add_arguments(parser)`.
Names and the sink's Protocol are in `names` and `sink`, which import neither torch nor Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ext.observe.options import add_arguments

if TYPE_CHECKING:
    from megatron_ext.observe.monitor import Monitor

__all__ = ["Monitor", "add_arguments"]


def __getattr__(name: str) -> Any:
    # Late, so that the report and `health` can read names without importing torch.
    if name == "Monitor":
        from megatron_ext.observe.monitor import Monitor

        return Monitor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
