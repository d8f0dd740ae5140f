"""Python's garbage collector and a long run: what lives as long as the run is not searched again and again, and on
request no search stops the host while the GPU waits for it.

A full collection walks over every object of the process. Torch, Transformer Engine and Megatron make about a million
that live to the end, so each takes some tenths of a second, in which a GPU that had less work queued stands still. With
those left out, one in the middle of a step still takes 5 to 8 ms on a lent H200 machine (seen in traces, a pause in the
forward pass of the experts' layers), and with the experts over several ranks all of them wait for the one that pauses.
"""

from __future__ import annotations

import gc
from argparse import ArgumentParser, Namespace

import torch

CHOICES = ("python", "step")
# Objects that may be made and not freed before Python collects by itself after all: an evaluation has no steps.
_AUTOMATIC = 500_000

_done = False
_each_step = False
_losses = 0  # of this step so far
_collected = False  # in this step


def add_arguments(parser: ArgumentParser) -> None:
    """Add `--moe-ext-garbage`."""
    group = parser.add_argument_group("moe-ext garbage collection")
    group.add_argument(
        "--moe-ext-garbage",
        choices=CHOICES,
        default="python",
        help="when Python's garbage is collected: whenever Python likes, or once a step, when the host has launched "
        "the last backward pass and the GPU has still to do it (default: %(default)s)",
    )


def configure(args: Namespace) -> None:
    """Take the flag, before the first step."""
    global _each_step
    _each_step = args.moe_ext_garbage == "step"


def freeze_once() -> None:
    """Collect once, then leave out of all later collections what is alive now; later calls do nothing.

    Called after the first step, when model, optimizer, data loaders and compiled kernels exist. What later steps make
    and drop in cycles is collected as before, in a fraction of the time.
    """
    global _done
    if _done:
        return
    _done = True
    gc.collect()
    gc.freeze()
    if _each_step:
        gc.set_threshold(_AUTOMATIC, *gc.get_threshold()[1:])


def loss_made(loss: torch.Tensor, micro_batches: int) -> None:
    """Collect behind the backward pass of the step's last loss, on the rank that has it.

    The host is far ahead of the GPU then and waits for it next, to check the gradients for NaN.

    Args:
        loss: [], of one micro-batch.
        micro_batches: Of the step, each with one call.
    """
    global _losses
    if not _each_step or not loss.requires_grad:
        return
    _losses += 1
    if _losses >= micro_batches:
        _losses = 0
        if _done:
            loss.register_hook(_collect_behind)


def _collect_behind(_: torch.Tensor) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(_collect)


def _collect() -> None:
    global _collected
    _collected = True
    gc.collect()


def step_end() -> None:
    """Close a step: freeze after the first, and collect where no backward pass of this rank did."""
    global _collected
    if _done and _each_step and not _collected:
        gc.collect()
    _collected = False
    freeze_once()
