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


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = 240,
    dead: tuple[int, ...] = (),
    wait_for: tuple[int, ...] | None = None,
    last_barrier: bool = True,
) -> list[Any]:
    """Call `function(rank, world, *args)` on `world` processes joined by gloo over the loopback.

    Args:
        function: A function of a module.
        world: Processes.
        args: For the function.
        timeout_s: For all answers.
        dead: Ranks that end without an answer.
        wait_for: Only these ranks' answers are waited for (default: all that are not dead).
        last_barrier: Leave together; not where a rank's fault is the point.
    """
    awaited = set(range(world) if wait_for is None else wait_for) - set(dead)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        queue: Any = context.Queue()
        leave = last_barrier and not dead
        settings = (function, world, str(Path(folder) / "store"), queue, args, leave)
        ranks = [context.Process(target=_rank, args=(r, *settings), daemon=True) for r in range(world)]
        for rank in ranks:
            rank.start()
        answers: dict[int, Any] = {}
        try:
            while awaited - set(answers):
                rank_number, value = _answer(queue, timeout_s)
                answers[rank_number] = value
            for rank in ranks if leave else []:
                rank.join(timeout=10)
        finally:
            for rank in ranks:
                rank.kill()
    return [answers.get(r) for r in range(world) if r not in dead]


def _answer(queue: Any, timeout_s: float) -> tuple[int, Any]:
    rank, good, value = queue.get(timeout=timeout_s)
    if not good:
        raise AssertionError(f"rank {rank} failed:\n{value}")
    return rank, value


def _rank(
    rank: int,
    function: Callable[..., Any],
    world: int,
    store: str,
    queue: Any,
    args: tuple[Any, ...],
    last_barrier: bool,
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
        if last_barrier:
            dist.barrier()
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
