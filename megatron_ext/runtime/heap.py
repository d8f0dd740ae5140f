"""Python's garbage collector and a long run: what lives as long as the run is not searched again and again.

A full collection walks over every object of the process. Torch, Transformer Engine and Megatron make about a million
that live to the end, so each takes some tenths of a second, in which a GPU that had less work queued stands still.
"""

from __future__ import annotations

import gc

_done = False


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
