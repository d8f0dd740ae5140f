"""Ranks side by side: who is late by how much, whatever their clocks say."""

from __future__ import annotations

import made
import pytest

from megatron_ext.trace import account, ranks, read_traces, summarize
from megatron_ext.trace.advice import first_look


def _compare(folder):
    traces = read_traces([folder])
    return ranks.compare(traces, [account.work_of(trace) for trace in traces])


@pytest.mark.parametrize("clock", [0.0, 5000.0, -3e6])
def test_the_late_rank_is_named_with_what_it_cost(tmp_path, clock):
    made.two_ranks(tmp_path, late=40, clock=clock)
    found = _compare(tmp_path)
    assert found.offsets_ns == (0, int(clock * 1000))
    (arrival,) = found.arrivals
    assert (arrival.kind, arrival.count) == ("all-to-all", 3)
    assert found.waited_ns == (40_000, 0)
    assert found.caused_ns == (0, 40_000)
    assert arrival.last[1] >= 1


def test_imbalance_of_the_experts(tmp_path):
    made.two_ranks(tmp_path, late=40)
    found = _compare(tmp_path)
    assert found.experts_ns == (90_000, 130_000)
    assert found.imbalance == pytest.approx(130 / 110 - 1)


def test_nobody_waits_longer_than_its_own_call(tmp_path):
    """A call that was issued without waiting can end long before another rank comes."""
    for rank, at in ((0, 0.0), (1, 500.0)):
        trace = made.Made(rank)
        trace.step(3, 0, 1000)
        trace.all_to_all(100, 50)
        trace.all_to_all(200 + at, 100)
        trace.all_to_all(800, 50)
        trace.write(tmp_path)
    assert _compare(tmp_path).waited_ns == (100_000, 0)


def test_groups_of_other_ranks_are_not_mixed_up(tmp_path):
    """Ranks 0, 1 and 2, 3 are two groups; a collective over all four joins their clocks."""
    for rank in range(4):
        trace = made.Made(rank, world_size=4, clock=rank * 100)
        group = [0, 1] if rank < 2 else [2, 3]
        pair = {"Collective name": "all_to_allv", "Group size": 2, "Process Group Ranks": str(group), "dtype": "Float"}
        every = {"Collective name": "allreduce", "Group size": 4, "Process Group Ranks": "[0, 1, 2, 3]"}
        trace.step(3, 0, 1000)
        late = 30 if rank == 3 else 0
        trace.kernel(made.SEND_RECV, 100 + late, 100 - late, 20, **pair)
        if rank >= 2:  # the second group has one collective more
            trace.kernel(made.SEND_RECV, 300, 100, 20, **pair)
        trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 500, 100, 21, **every)
        trace.write(tmp_path)
    found = _compare(tmp_path)
    assert found.offsets_ns == (0, 100_000, 200_000, 300_000)
    assert found.waited_ns == (0, 0, 30_000, 0)
    assert found.caused_ns == (0, 0, 0, 30_000)
    assert {arrival.kind: arrival.count for arrival in found.arrivals} == {"all-reduce": 1, "all-to-all": 3}


def test_collectives_that_do_not_match_are_left_out_and_said(tmp_path):
    for rank in (0, 1):
        trace = made.Made(rank)
        trace.step(3, 0, 1000)
        for at in range(2 + rank):
            trace.all_to_all(100 + 100 * at, 50)
        trace.write(tmp_path)
    found = _compare(tmp_path)
    assert found.arrivals == ()
    assert found.waited_ns == ()
    assert any("all-to-all" in note and "2, 3 on ranks 0, 1" in note for note in found.notes)


def test_waiting_for_a_late_rank_is_not_put_down_to_the_transport(tmp_path):
    """Rank 0 spends 40 % of the span in an all-to-all, three quarters of it waiting for rank 1's experts."""
    for rank in (0, 1):
        trace = made.Made(rank)
        trace.step(3, 0, 1000)
        came = 600 if rank == 0 else 900
        trace.kernel(made.GROUPED, 0, came)
        trace.all_to_all(came, 1000 - came)
        trace.write(tmp_path)
    traces = read_traces([tmp_path])
    works = [account.work_of(trace) for trace in traces]
    found = [summarize(trace, work) for trace, work in zip(traces, works, strict=True)]
    look = first_look(found, ranks.compare(traces, works))
    assert look.what == "ranks wait in collectives for the last one to come"
    assert look.share == pytest.approx(0.15)  # 300 of 2,000 us
    assert first_look(found).what.startswith("all-to-all")


def test_the_last_line_names_the_largest_thing(tmp_path):
    made.two_ranks(tmp_path / "idle")
    traces = read_traces([tmp_path / "idle"])
    works = [account.work_of(trace) for trace in traces]
    found = [summarize(trace, work) for trace, work in zip(traces, works, strict=True)]
    # 460 of 1,000 us idle, without a wait of the host.
    assert "while the host prepares" in first_look(found).what
    assert first_look(found).share == pytest.approx(0.46)

    busy = made.Made()
    busy.step(3, 0, 100)
    busy.kernel(made.GEMM, 0, 60)
    busy.all_to_all(60, 40)
    trace = read_traces([busy.write(tmp_path / "busy")])[0]
    look = first_look([summarize(trace, account.work_of(trace))])
    assert look.what.startswith("all-to-all")
    assert look.share == pytest.approx(0.4)
    assert "dedup" in look.knob

    good = made.Made()
    good.step(3, 0, 100)
    good.kernel(made.GEMM, 0, 98)
    trace = read_traces([good.write(tmp_path / "good")])[0]
    assert "nothing else takes 5 %" in first_look([summarize(trace, account.work_of(trace))]).text()
