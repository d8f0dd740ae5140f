"""What Megatron takes for its TensorBoard writer: passes every scalar to the run directory and to the stock
writer.

A subclass, because `Timers.write` (megatron/core/timers.py) writes only to instances of SummaryWriter: a
look-alike would silently lose all timers. The parent's constructor is not called, so no event file is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megatron_ext.tracking.writer import RunWriter

# Megatron logs most scalars twice, the second time under this ending with the consumed samples as the step.
# As rows they would collide with iterations of the same number, so the value is dropped and the step kept
# as `samples`.
SAMPLES_ENDING = " vs samples"


class TeeSummaryWriter(SummaryWriter):
    """Passes scalars to a `RunWriter`, and everything to `inner` (the stock writer) where there is one.

    Args:
        run_writer: Where scalars go.
        inner: Megatron's own writer, or None.
    """

    def __init__(self, run_writer: RunWriter, inner: SummaryWriter | None = None) -> None:
        self._run_writer = run_writer
        self._inner = inner
        self._step = 0

    def add_scalar(
        self, tag: str, scalar_value: Any, global_step: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Record one scalar; `scalar_value` may be a number or a tensor with one element on any device."""
        if self._inner is not None:
            self._inner.add_scalar(tag, scalar_value, global_step, *args, **kwargs)
        if tag.endswith(SAMPLES_ENDING):
            if global_step is not None:
                self._run_writer.samples(self._step, int(global_step))
            return
        self._step = self._step if global_step is None else int(global_step)
        self._run_writer.scalars(self._step, {tag: float(scalar_value)})

    def add_scalars(
        self,
        main_tag: str,
        tag_scalar_dict: dict[str, Any],
        global_step: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Record several scalars under `main_tag/name`, as TensorBoard shows them."""
        if self._inner is not None:
            self._inner.add_scalars(main_tag, tag_scalar_dict, global_step, *args, **kwargs)
        self._step = self._step if global_step is None else int(global_step)
        self._run_writer.scalars(
            self._step, {f"{main_tag}/{name}": float(value) for name, value in tag_scalar_dict.items()}
        )

    def flush(self) -> None:
        """Flush the stock writer. Our rows go out by themselves when the step changes."""
        if self._inner is not None:
            self._inner.flush()

    def close(self) -> None:
        """Close both."""
        if self._inner is not None:
            self._inner.close()
        self._run_writer.close()

    def get_logdir(self) -> str:
        """Return the stock writer's directory, else the run directory."""
        return self._inner.get_logdir() if self._inner is not None else str(self._run_writer.run_dir)


def _forward(name: str) -> Callable[..., None]:
    def call(self: TeeSummaryWriter, *args: Any, **kwargs: Any) -> None:
        if self._inner is not None:
            getattr(self._inner, name)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = "Pass to the stock writer, if there is one."
    return call


# Text, histograms, images, graphs ... : the parent's methods would touch a file writer that was never made.
for _name in dir(SummaryWriter):
    if _name.startswith("add_") and _name not in vars(TeeSummaryWriter):
        setattr(TeeSummaryWriter, _name, _forward(_name))
