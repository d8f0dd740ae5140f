"""The sums: every moment of the span once, what hides and what does not, by numbers that were worked out by hand."""

from __future__ import annotations

from pathlib import Path

import made
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.trace import intervals, kinds, read_trace, rows_of, summarize, work_of
from megatron_ext.trace.account import exposed
from megatron_ext.trace.comms import bus_factor, communication


def _summary(trace: made.Made, folder: Path, **options: object):
    read = read_trace(trace.write(folder))
    return summarize(read, work_of(read, **options))


def _spans(summary) -> dict[str, float]:
    """Microseconds of the span by kind."""
    return {row.kind: row.span_ns / 1e3 for row in summary.rows}


def test_overlapping_streams_are_counted_once(tmp_path):
    trace = made.Made()
    trace.step(3, 0, 1000)
    trace.kernel(made.GEMM, 100, 200)  # 100-300
    trace.kernel(made.FLASH, 250, 100)  # 250-350: 50 beside the product; attention goes before it
    trace.kernel(made.GEMM, 400, 100)  # 400-500
    trace.kernel(made.GEMM, 450, 100, stream=8)  # 450-550, on a second stream
    trace.all_to_all(500, 100)  # 500-600: 50 beside the product
    trace.add("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 580, 40, made.STREAM, stream=7)  # 20 alone
    summary = _summary(trace, tmp_path)
    assert summary.span_ns == 1_000_000
    assert _spans(summary) == {
        "attention": 100.0, "GEMM": 300.0, "all-to-all": 50.0, "memcpy, memset": 20.0, "idle": 530.0,
    }  # fmt: skip
    busy = {row.kind: (row.busy_ns / 1e3, row.count) for row in summary.rows}
    assert busy["GEMM"] == (400.0, 3)
    assert busy["all-to-all"] == (100.0, 1)


def test_hidden_and_exposed_communication(tmp_path):
    trace = made.Made()
    trace.step(3, 0, 1000)
    trace.kernel(made.GEMM, 0, 300)
    trace.all_to_all(200, 200, elements=1000)  # 100 hidden, 100 exposed
    trace.kernel(made.ALL_GATHER, 350, 100, 21)  # 50 beside the all-to-all, and all of it exposed
    trace.add("gpu_memset", "Memset (Device)", 380, 10, made.STREAM)  # no computation
    found = _summary(trace, tmp_path).communication
    assert (found.total_ns, found.hidden_ns, found.exposed_ns) == (250_000, 100_000, 150_000)
    by_kind = {one.kind: one for one in found.collectives}
    assert (by_kind["all-to-all"].total_ns, by_kind["all-to-all"].exposed_ns) == (200_000, 100_000)
    assert (by_kind["all-gather"].total_ns, by_kind["all-gather"].exposed_ns) == (100_000, 100_000)
    # 1,000 elements of two bytes in 200 us over two ranks: half of 10 MB/s.
    assert by_kind["all-to-all"].bytes == 2000
    assert by_kind["all-to-all"].gbps == pytest.approx(0.005)
    assert by_kind["all-gather"].bytes == 0


def test_sizes_come_from_the_call_where_the_kernel_has_none(tmp_path):
    trace = made.Made()
    trace.step(3, 0, 1000)
    about = {"Collective name": "alltoall_base", "In msg nelems": 500, "Out msg nelems": 400, "dtype": "Float"}
    trace.add("cpu_op", "record_param_comms", 10, 5, made.MAIN, **{"External id": 77, "Group size": 2, **about})
    trace.kernel(made.SEND_RECV, 100, 50, made.NCCL_STREAM, **{"External id": 77})
    trace.kernel(made.SEND_RECV, 300, 50, made.NCCL_STREAM, **{"External id": 78})
    by_kind = {one.kind: one for one in _summary(trace, tmp_path).communication.collectives}
    assert (by_kind["all-to-all"].count, by_kind["all-to-all"].bytes) == (1, 2000)
    assert (by_kind[kinds.UNKNOWN_PAIRS].count, by_kind[kinds.UNKNOWN_PAIRS].bytes) == (1, 0)


def test_bus_bandwidth_counts_as_nccl_tests_does():
    assert bus_factor("all-reduce", 8) == pytest.approx(1.75)
    assert bus_factor("all-to-all", 8) == pytest.approx(0.875)
    assert bus_factor("broadcast", 8) == 1.0


def test_one_step_of_several(tmp_path):
    trace = made.Made()
    trace.step(3, 0, 500)
    trace.step(4, 500, 500)
    trace.kernel(made.GEMM, 100, 300)
    trace.kernel(made.GEMM, 450, 100)  # over the border
    trace.kernel(made.GEMM, 950, 100)  # the GPU ends later than the host
    whole, second = _summary(trace, tmp_path), _summary(trace, tmp_path, step=4)
    assert (whole.steps, whole.span_ns) == ((3, 4), 1_050_000)
    assert _spans(whole) == {"GEMM": 500.0, "idle": 550.0}
    assert (second.steps, second.span_ns) == ((4,), 500_000)
    assert _spans(second) == {"GEMM": 100.0, "idle": 400.0}


def test_a_gap_names_its_neighbours_and_what_the_host_did(tmp_path):
    trace = made.Made()
    trace.step(3, 0, 1000)
    trace.kernel(made.GEMM, 10, 190, launched=1)
    # The host waits for the product inside item(), comes back at 205, and launches again at 390 after a slow operator.
    trace.op("aten::item", 20, 186)
    trace.call("cudaStreamSynchronize", 25, 180)
    trace.op("SlowThing", 210, 170)
    trace.kernel(made.FLASH, 400, 600, launched=390)
    summary = _summary(trace, tmp_path)
    longest = summary.gaps[0]
    assert (longest.at_ns, longest.took_ns) == (200_000, 200_000)
    assert longest.before.startswith("nvjet")
    assert longest.after.startswith("cudnn")
    assert longest.host == "SlowThing"
    assert longest.wait == "cudaStreamSynchronize in aten::item"
    assert summary.idle_after_wait_ns == 200_000
    assert summary.idle_ns == 210_000
    (wait,) = summary.waits
    assert (wait.call, wait.place, wait.total_ns, wait.count) == ("cudaStreamSynchronize", "aten::item", 180_000, 1)


def test_a_gap_without_a_wait_is_the_host_being_slow(tmp_path):
    trace = made.Made()
    trace.step(3, 0, 100)
    for at in range(0, 100, 20):
        trace.op("aten::add", at, 15)
        trace.kernel(made.GEMM, at + 12, 5, launched=at + 3)
    summary = _summary(trace, tmp_path)
    assert summary.idle_after_wait_ns == 0
    assert summary.idle_ns == 75_000
    assert summary.pairs[0].count == 4  # between the five; what lies before the first has no kernel before it
    assert summary.pairs[0].total_ns == 60_000


def test_a_wait_that_begins_in_a_gap_is_not_its_cause(tmp_path):
    trace = made.Made()
    trace.step(3, 0, 1000)
    trace.kernel(made.GEMM, 0, 200)
    trace.call("cudaStreamSynchronize", 300, 50)  # there is nothing to wait for any more
    trace.kernel(made.GEMM, 500, 500, launched=490)
    summary = _summary(trace, tmp_path)
    assert summary.idle_ns == 300_000
    assert summary.idle_after_wait_ns == 0
    assert summary.gaps[0].wait == ""


def test_the_order_of_events_in_the_file_does_not_matter(tmp_path):
    trace = made.Made()
    trace.step(3, 0, 1000)
    trace.op("aten::matmul", 100, 200)
    trace.op("aten::mm", 110, 100)
    trace.op("aten::silu", 400, 90)
    ordered = _summary(trace, tmp_path / "ordered")
    trace.events.reverse()
    turned = _summary(trace, tmp_path / "turned")
    assert turned.rows == ordered.rows
    assert turned.names == ordered.names


def test_a_copy_of_pageable_memory_is_a_wait_and_of_pinned_memory_is_not(tmp_path):
    trace = made.Made()
    trace.step(3, 0, 1000)
    trace.kernel(made.GEMM, 0, 400)
    trace.op("aten::to", 90, 330)
    trace.copy("Memcpy DtoH (Device -> Pageable)", 400, 10, launched=100, waited=310)
    trace.copy("Memcpy DtoH (Device -> Pinned)", 500, 10, launched=480, waited=3)
    (wait,) = _summary(trace, tmp_path).waits
    assert (wait.call, wait.place, wait.total_ns) == ("cudaMemcpyAsync", "aten::to", 310_000)


def test_frames_of_python_say_where_a_wait_comes_from(tmp_path):
    trace = made.Made()
    trace.step(3, 0, 1000)
    trace.kernel(made.GEMM, 0, 400)
    frame = "/x/build/megatron/megatron/core/optimizer/clip_grads.py(120): get_grad_norm"
    trace.add("python_function", frame, 10, 500, made.MAIN)
    trace.add("python_function", "torch/_tensor.py(1): item", 20, 400, made.MAIN)
    trace.op("aten::item", 30, 380)
    trace.call("cudaStreamSynchronize", 40, 360)
    (wait,) = _summary(trace, tmp_path).waits
    assert wait.place == "aten::item at core/optimizer/clip_grads.py(120): get_grad_norm"


def test_host_operators_by_their_own_time(tmp_path):
    trace = made.Made()
    trace.step(3, 0, 1000)
    trace.op("LinearWithGradAccumulationAndAsyncCommunication", 100, 300)
    trace.op("aten::matmul", 150, 200)
    trace.op("aten::mm", 160, 180)
    trace.op("_AllToAll", 500, 200)  # waits for gloo's thread
    trace.add("user_annotation", "gloo:all_to_all", 520, 160, 900)
    trace.add("user_annotation", "Optimizer.step#AdamW.step", 800, 100, made.MAIN)
    trace.op("aten::mul_", 820, 30)
    summary = _summary(trace, tmp_path)
    assert not summary.device
    assert _spans(summary) == {
        "GEMM": 200.0, "optimizer": 100.0, "all-to-all": 160.0, "autograd, other operators": 140.0,
        "Python, no operator": 400.0,
    }  # fmt: skip
    assert summary.gaps == ()
    names = {(named.name, named.kind): named.total_ns / 1e3 for named in summary.names}
    assert names["aten::mm", "GEMM"] == 180.0
    assert names["aten::matmul", "GEMM"] == 20.0
    counts = {named.name: named.count for named in summary.names}
    assert counts["aten::matmul"] == 1  # in two pieces, before and after aten::mm
    assert names["aten::mul_", "optimizer"] == 30.0


_NAMES = (made.GEMM, made.GROUPED, made.FLASH, made.SEND_RECV, made.ALL_GATHER, "_permute_kernel", "whatever")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(_NAMES), st.integers(0, 900), st.integers(1, 300), st.integers(1, 4)), min_size=1
    ),
    st.integers(600, 1300),
)
def test_rows_add_up_to_the_span_whatever_overlaps(tmp_path_factory, events, span):
    """By counting microseconds one by one, which needs no interval."""
    trace = made.Made()
    trace.step(3, 0, span)
    for name, at, took, stream in events:
        trace.kernel(name, at, took, stream)
    read = read_trace(trace.write(tmp_path_factory.mktemp("property")))
    work = work_of(read)
    rows = {row.kind: row.span_ns for row in rows_of(work)}
    assert sum(rows.values()) == work.span == max(span, *(at + took for _, at, took, _ in events)) * 1000
    running = np.zeros((len(work.order), work.span // 1000), bool)
    for name, at, took, _ in events:
        running[work.order.index(kinds.kernel_kind(name)), at : at + took] = True
    first = np.where(running.any(0), running.argmax(0), -1)
    for number, kind in enumerate(work.order):
        assert rows.get(kind, 0) == (first == number).sum() * 1000
    assert rows["idle"] == (first == -1).sum() * 1000
    found = communication(read, work)
    is_comm = np.array([kind in kinds.COMMUNICATION for kind in work.order])
    is_compute = np.array([kind in kinds.COMPUTE for kind in work.order])
    moving, computing = running[is_comm].any(0), running[is_compute].any(0)
    assert found.total_ns == moving.sum() * 1000
    assert found.exposed_ns == (moving & ~computing).sum() * 1000
    assert found.exposed_ns + found.hidden_ns == found.total_ns
    assert found.exposed_ns == sum(rows.get(kind, 0) for kind in kinds.COMMUNICATION)


_INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


@settings(max_examples=200, deadline=None)
@given(_INTERVALS, _INTERVALS)
def test_unions_and_differences_against_sets_of_moments(first, second):
    def of(pairs):
        start = np.array([at for at, _ in pairs], np.int64)
        return intervals.union(start, start + np.array([took for _, took in pairs], np.int64))

    def moments(covered):
        return {t for begin, end in zip(*covered, strict=True) for t in range(int(begin), int(end))}

    a, b = ({t for at, took in pairs for t in range(at, at + took)} for pairs in (first, second))
    assert moments(of(first)) == a
    start, end = of(first)
    assert (start[1:] > end[:-1]).all()
    assert intervals.measure(of(first)) == len(a)
    assert moments(intervals.without(of(first), of(second))) == a - b
    assert moments(intervals.together((of(first), of(second)))) == a | b
    assert moments(intervals.between(of(first), 5, 50)) == set(range(5, 50)) - a


def test_exposed_needs_something_that_runs(tmp_path):
    trace = made.Made()
    trace.step(3, 0, 10)
    trace.kernel(made.GEMM, 0, 5)
    work = work_of(read_trace(trace.write(tmp_path)))
    assert intervals.measure(exposed(work, "all-to-all")) == 0
