"""What the other ranks see when one dies, hangs, or counts wrongly: a clear error, within the timeout."""

from __future__ import annotations

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from gloo_world import run_ranks

from megatron_ext.dispatch.engine import Engine
from megatron_ext.dispatch.errors import DispatchError
from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.transport import Groups, make_groups

TIMEOUT_S = 5


def _dispatch(rank: int, world: int, group: object, *, static: bool = False) -> str:
    """One dispatch; the error's text, or "none"."""
    engine = Engine(Layout(world, rank, 2, world), Groups(group), static=static)
    ids = torch.arange(2 * world).remainder(2 * world).view(-1, 2).sort(dim=1).values
    try:
        engine.dispatch(torch.randn(len(ids), 8), ids, torch.rand(len(ids), 2))
    except DispatchError as error:
        return error.text()
    return "none"


def _one_dies(rank: int, world: int) -> str:
    dist.barrier()
    if rank == world - 1:
        os._exit(9)
    return _dispatch(rank, world, dist.group.WORLD)


def test_a_rank_that_dies_is_a_clear_error_on_the_others() -> None:
    answers = run_ranks(_one_dies, 4, dead=(3,))
    for rank, text in enumerate(answers):
        assert "of a dispatch failed" in text
        assert f"rank {rank} of 4" in text
        assert "first rank that stopped" in text


def _one_dies_at(rank: int, world: int, collective: str, call: int) -> str:
    """Rank 3 of two nodes of two ends as it enters a collective for the n-th time; the others' error, there or home."""
    layout = Layout(world, rank, 2, 2)
    engine = Engine(layout, make_groups(layout, dist.group.WORLD, two_hops=True), static=False)
    dist.barrier()
    stock, calls = getattr(dist, collective), [0]

    def deadly(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == call:
            os._exit(9)
        return stock(*args, **kwargs)

    if rank == 3:
        setattr(dist, collective, deadly)
    ids = torch.rand(16, 2 * world).topk(4, dim=1).indices.sort(dim=1).values
    try:
        rows, _, handle = engine.dispatch(torch.randn(16, 8), ids, torch.rand(16, 4))
        engine.combine(rows.contiguous(), handle)
    except DispatchError as error:
        return error.text()
    return "none"


@pytest.mark.parametrize(
    ("collective", "call", "first_to_see"),
    [
        ("all_gather_into_tensor", 1, {0: "the exchange of counts", 1: "the exchange of counts"}),
        ("all_to_all_single", 1, {1: "the rail hop", 2: "the node hop"}),
        ("all_to_all_single", 2, {2: "the node hop"}),
        ("all_to_all_single", 3, {2: "the node hop"}),
        ("all_to_all_single", 4, {1: "the rail hop"}),
    ],
    ids=["counts", "rail hop", "node hop", "node hop home", "rail hop home"],
)
def test_a_rank_that_dies_at_any_exchange_is_an_error_on_its_peers(
    collective: str, call: int, first_to_see: dict[int, str]
) -> None:
    answers = run_ranks(_one_dies_at, 4, collective, call, dead=(3,), timeout_s=30)
    for rank, hop in first_to_see.items():
        assert f"{hop} of a dispatch failed" in answers[rank]
        assert f"rank {rank} of 4" in answers[rank]


def _one_hangs(rank: int, world: int) -> tuple[float, str]:
    group = dist.new_group(list(range(world)), timeout=datetime.timedelta(seconds=TIMEOUT_S))
    dist.barrier()
    if rank == 1:
        time.sleep(4 * TIMEOUT_S)
        return 0.0, "slept"
    begin = time.monotonic()
    text = _dispatch(rank, world, group)
    return time.monotonic() - begin, text


def test_a_rank_that_hangs_is_an_error_within_the_timeout() -> None:
    answers = run_ranks(_one_hangs, 2, last_barrier=False, wait_for=(0,))
    waited, text = answers[0]
    assert "the exchange of counts of a dispatch failed" in text
    assert waited < 3 * TIMEOUT_S


def _one_reads_wrong_counts(rank: int, world: int) -> str:
    stock = dist.all_gather_into_tensor

    def corrupted(out: torch.Tensor, *args: object, **kwargs: object) -> None:
        stock(out, *args, **kwargs)
        out[3] += 1  # a row count of rank 0

    if rank == 2:
        dist.all_gather_into_tensor = corrupted
    return _dispatch(rank, world, dist.group.WORLD)


def test_a_corrupted_split_size_is_caught_before_any_row_moves() -> None:
    text = run_ranks(_one_reads_wrong_counts, 3, last_barrier=False, wait_for=(2,))[2]
    assert "do not agree on the split sizes" in text
    assert "counts of rank 0, seen by rank 2" in text


def _wrong_rows(rank: int, world: int) -> str:
    from megatron_ext.dispatch.transport import Exchange

    layout = Layout(world, rank, 2, world)
    splits = tuple(0 if r == rank else 2 for r in range(world))
    exchange = Exchange(dist.group.WORLD, layout, "the test hop", rank, splits, splits)
    try:
        exchange.go(torch.zeros(3, 4), torch.zeros(2, 4))
    except DispatchError as error:
        return error.text()
    return "none"


def test_rows_that_do_not_match_their_split_sizes_are_caught() -> None:
    for rank, text in enumerate(run_ranks(_wrong_rows, 2)):
        assert "do not match the split sizes of the test hop" in text
        assert f"rank {rank}: 3 rows to send" in text
