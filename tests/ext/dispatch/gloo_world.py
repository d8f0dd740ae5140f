"""Run a function on N gloo ranks. One forked server imports torch once; its children start in milliseconds.

Every rank's result comes back in rank order; the first failing rank's traceback fails the test.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch._dynamo", "torch.utils.checkpoint", "megatron_ext.dispatch.autograd"]


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 240) -> list[Any]:
    """Call `function(rank, world, *args)` on `world` processes joined by gloo over the loopback."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        queue: Any = context.Queue()
        store = Path(folder) / "store"
        ranks = [
            context.Process(target=_rank, args=(function, r, world, str(store), queue, args), daemon=True)
            for r in range(world)
        ]
        for rank in ranks:
            rank.start()
        try:
            answers = dict(_answer(queue, timeout_s) for _ in range(world))
            for rank in ranks:
                rank.join(timeout=10)
        finally:
            for rank in ranks:
                rank.kill()
    return [answers[r] for r in range(world)]


def _answer(queue: Any, timeout_s: float) -> tuple[int, Any]:
    rank, good, value = queue.get(timeout=timeout_s)
    if not good:
        raise AssertionError(f"rank {rank} failed:\n{value}")
    return rank, value


def _rank(
    function: Callable[..., Any], rank: int, world: int, store: str, queue: Any, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        queue.put((rank, True, function(rank, world, *args)))
        dist.barrier()
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
