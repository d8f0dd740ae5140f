"""What all probes share: when a hook may count, and what happens when it fails.

A forward runs twice under recompute, once without gradients. Counting only where the module trains and gradients are
on counts each micro-batch once, with and without recompute, and leaves evaluation out (Megatron uses the same rule for
its z-loss). An exception in a hook turns its probe off on this rank, says so once, and never reaches the training step.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_ext.errors import UserError
from megatron_ext.observe.layers import MoELayerRef
from megatron_ext.observe.store import Store
from megatron_ext.observe.topology import Topology

logger = logging.getLogger("megatron_ext.observe")

Observe = Callable[[MoELayerRef, tuple[Any, ...], dict[str, Any], Any], None]


class Run:
    """What the probes of one rank see of the run.

    Attributes:
        place: This rank's place.
        store: The running sums.
        sampling: Whether the current step is a sampled one.
        labels: int64 [batch], the data labels of the current micro-batch, None where nobody gave them.
        graphed: Whether the router's hook doesn't fire because it is inside a CUDA graph.
        native: Row -> logits [T, E] of the router call whose hooks are running, from the first that needs them to the
            last; None where only one does.
    """

    def __init__(self, place: Topology, store: Store) -> None:
        """Start outside a sampled step, without labels."""
        self.place = place
        self.store = store
        self.sampling = False
        self.labels: Tensor | None = None
        self.graphed = False
        self.native: dict[int, Tensor] | None = None


class Probe(ABC):
    """One kind of measurement.

    Class attributes:
        name: In the log.
        measures: The metrics that are lost when it is off.
        every_step: Whether it counts on every step, or on sampled ones only.
    """

    name: ClassVar[str]
    measures: ClassVar[tuple[str, ...]]
    every_step: ClassVar[bool] = False

    def __init__(self, run: Run) -> None:
        """Keep the run; nothing is hooked yet."""
        self.run = run
        self.off = False

    @classmethod
    @abstractmethod
    def refusal(cls, config: Any, place: Topology) -> str:
        """Return why this can't be measured with Megatron's `config`, naming the flag; "" where it can."""

    @abstractmethod
    def install(self, layer: MoELayerRef) -> None:
        """Hook one layer.

        Raises:
            UserError: What is to be hooked isn't there.
        """

    def at_flush(self, layers: tuple[MoELayerRef, ...]) -> None:  # noqa: B027  most probes need nothing here
        """Add what needs no hook, at the end of a sampled step."""

    def hook(self, layer: MoELayerRef, module: Any, what: str, observe: Observe) -> None:
        """Call `observe(layer, args, kwargs, output)` after each counted forward of `module`.

        Raises:
            UserError: `module` is no module: Megatron's is not the one that this was written for.
        """
        if not isinstance(module, torch.nn.Module):
            raise UserError(
                f"{self.name}: nothing to hook",
                where=f"layer {layer.row}: {what} is {type(module).__name__}",
                why="Megatron's module is not what this version of the distribution was written for",
                remedy="run with --moe-ext-observe-interval 0, and report the Megatron version",
            )

        def call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self.counting(module):
                self.guarded(lambda: observe(layer, args, kwargs, output))

        module.register_forward_hook(call, with_kwargs=True)

    def counting(self, module: Any) -> bool:
        """Return whether a forward of `module` that runs now is to be counted."""
        wanted = not self.off and (self.every_step or self.run.sampling)
        return wanted and module.training and torch.is_grad_enabled() and not _capturing()

    def guarded(self, work: Callable[[], None]) -> None:
        """Do `work` without gradients; on any exception turn this probe off."""
        try:
            with torch.no_grad():
                work()
        except Exception as error:
            self.turn_off(f"{type(error).__name__}: {error}")

    def turn_off(self, why: str) -> None:
        """Stop measuring on this rank and say so once."""
        self.off = True
        logger.warning(
            "observe: %s turned itself off on rank %d, training goes on; lost: %s (%s)",
            self.name,
            self.run.place.rank,
            ", ".join(self.measures),
            why,
        )


def _capturing() -> bool:
    """Return whether a CUDA graph is being captured: what runs now would be replayed, not called."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def padding_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the router call's padding mask as bool [T] (True is padding, whatever its docstring says), or None."""
    mask = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)
    return None if mask is None else mask.reshape(-1).bool()
