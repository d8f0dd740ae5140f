"""The simulator against the closed formula, against published figures, and against the counters of counted routings."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from megatron_ext.cli import main
from megatron_ext.dispatch import formula, routing
from megatron_ext.dispatch.counters import traffic
from megatron_ext.dispatch.counts import Counts
from megatron_ext.dispatch.layout import Layout
from megatron_ext.plan.dispatch import Cluster, Layer, draw_choices, simulate

CASES = [(64, 8, 2, 1), (64, 8, 8, 1), (64, 8, 16, 8), (256, 8, 32, 8), (256, 8, 64, 8), (8, 2, 8, 1)]


def _rows(layer: Layer, cluster: Cluster) -> dict[str, float]:
    return {one.name: one.rows_off_node for one in simulate(layer, cluster, samples=20_000)}


@pytest.mark.parametrize(("experts", "top_k", "ep", "per_node"), CASES)
def test_even_routing_agrees_with_the_formula(experts: int, top_k: int, ep: int, per_node: int) -> None:
    rows = _rows(Layer(experts, top_k, 2048, 1), Cluster(ep, per_node))
    nodes = ep // per_node
    assert rows["alltoall"] == pytest.approx(formula.copies_per_expert(top_k, nodes), rel=0.01)
    assert rows["dedup"] == pytest.approx(formula.copies_rank_to_other_node(experts, top_k, ep, nodes), rel=0.01)
    assert rows["twohop"] == pytest.approx(formula.copies_off_set(experts, top_k, nodes), rel=0.01)
    assert rows["twohop-static"] == nodes - 1


def test_group_limited_routing_agrees_with_the_known_figures() -> None:
    rows = _rows(Layer(256, 8, 7168, 1, groups=8, group_top_k=4), Cluster(64, 8))
    assert rows["dedup"] == pytest.approx(6.55, abs=0.03)
    assert rows["twohop"] == pytest.approx(3.469, abs=0.03)


def test_ep16_is_about_twice_as_fast_in_sequence_and_four_times_pipelined() -> None:
    found = {one.name: one for one in simulate(Layer(64, 8, 2048, 8192), Cluster(16, 8), samples=20_000)}
    assert found["alltoall"].dispatch_ms / found["twohop"].dispatch_ms == pytest.approx(2.1, abs=0.05)
    assert found["alltoall"].dispatch_ms / found["twohop"].pipelined_ms == pytest.approx(4.0, abs=0.05)


@pytest.mark.parametrize("skew", [0.0, 1.5])
@pytest.mark.parametrize(("ep", "per_node"), [(8, 2), (16, 8)])
def test_simulated_rows_agree_with_the_counters_of_the_same_routing(ep: int, per_node: int, skew: float) -> None:
    layer, cluster = Layer(64, 8, 64, 500, skew=skew), Cluster(ep, per_node)
    layouts = [Layout(ep, rank, 64 // ep, per_node) for rank in range(ep)]
    drawn = torch.from_numpy(draw_choices(layer, 500 * ep, 0)).split(500)
    matrix = np.stack([routing.count_vector(i, at).numpy() for i, at in zip(drawn, layouts, strict=True)])
    counts = Counts(layouts[0], matrix.astype(np.int64))
    found = {one.name: one for one in simulate(layer, cluster, samples=500 * ep)}
    for name, two_hops in (("dedup", False), ("twohop", True)):
        one = traffic(counts, two_hops=two_hops, static_capacity=None, row_bytes=1)
        assert one.rows_off_node / one.tokens == pytest.approx(found[name].rows_off_node, rel=0.08)
        assert one.rows_off_rank / one.tokens == pytest.approx(found[name].rows_off_rank, rel=0.05)
    static = traffic(counts, two_hops=True, static_capacity=500, row_bytes=1)
    assert static.rows_off_node / static.tokens == found["twohop-static"].rows_off_node


def test_thousands_of_ranks_take_no_longer_than_a_moment() -> None:
    found = simulate(Layer(4096, 8, 7168, 8192), Cluster(4096, 8), samples=1024)
    assert found[0].rows_off_node == pytest.approx(8 * 511 / 512, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "text"),
    [("--ep 12", "fill whole nodes"), ("--experts 60", "do not divide over"), ("--top-k 65", "that many experts")],
)
def test_impossible_shapes_are_refused_without_a_traceback(
    flags: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "dispatch", *flags.split()]) == 64
    assert text in capsys.readouterr().err


def test_json_has_every_dispatcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "dispatch", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert names == ["alltoall", "dedup", "twohop", "twohop-static"]
