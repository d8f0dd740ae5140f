"""Run a function on N gloo ranks that are forked from this process, which has Megatron imported already."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import psutil
import torch.distributed as dist


def run(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 300) -> list[Any]:
    """Return what `function(*args)` returns on each of `world` ranks, in rank order.

    Raises:
        AssertionError: A rank failed (with its traceback), or some did not come back (with their numbers).
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.Queue()
        ranks = [
            context.Process(target=_rank, args=(rank, world, folder + "/store", results, function, args, timeout_s))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(results, world, timeout_s)
        finally:
            for process in ranks:
                _kill_family(process.pid)
                process.join()


def _kill_family(pid: int | None) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        rank = psutil.Process(pid)
        for one in [*rank.children(recursive=True), rank]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def end_children() -> None:
    """End what this rank has started, such as the process behind Megatron's checkpoint writer: it outlives a rank."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def _collect(results: Any, world: int, timeout_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < world:
        try:
            rank, error, value = results.get(timeout=timeout_s)
        except queue.Empty:
            missing = sorted(set(range(world)) - set(answers))
            raise AssertionError(f"ranks {missing} hang; the others came back") from None
        if error:
            raise AssertionError(f"rank {rank}:\n{error}")
        answers[rank] = value
    return [answers[rank] for rank in range(world)]


def _rank(
    rank: int, world: int, store: str, results: Any, function: Callable[..., Any], args: tuple, timeout_s: float
) -> None:
    # A hang says where: pytest shows this with the failure.
    faulthandler.dump_traceback_later(timeout_s - 20, exit=False)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        value = function(*args)
        dist.barrier()
        end_children()
        results.put((rank, "", value))
    except BaseException:
        error = traceback.format_exc()
        end_children()
        results.put((rank, error, None))
    results.close()
    results.join_thread()
    # No destructors of groups and threads that were made before the fork.
    os._exit(0)
