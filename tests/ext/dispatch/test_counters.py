"""Rows counted: on a worked routing, against the closed formula for the six known cases, and against what was sent."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_world import run_ranks

from megatron_ext.dispatch import formula, publish, routing
from megatron_ext.dispatch.counters import Counters, Traffic, traffic
from megatron_ext.dispatch.counts import Counts
from megatron_ext.dispatch.engine import Engine
from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.transport import make_groups

# experts, top-k, ranks, ranks a node. The last two columns of the table at one node count a rank as a node.
SIX = [(64, 8, 2, 1), (64, 8, 8, 1), (64, 8, 16, 8), (256, 8, 32, 8), (256, 8, 64, 8), (8, 2, 8, 1)]


def uniform_ids(tokens: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=made).topk(top_k, dim=1).indices.sort(dim=1).values


def counted(experts: int, top_k: int, ranks: int, per_node: int, tokens: int) -> Counts:
    """The counts of random routings of every rank."""
    layouts = [Layout(ranks, rank, experts // ranks, per_node) for rank in range(ranks)]
    vectors = [routing.count_vector(uniform_ids(tokens, experts, top_k, at.rank), at) for at in layouts]
    return Counts(layouts[0], torch.stack(vectors).numpy().astype(np.int64))


@pytest.mark.parametrize(("experts", "top_k", "ranks", "per_node"), SIX)
def test_counted_rows_equal_the_formula_within_sampling_error(
    experts: int, top_k: int, ranks: int, per_node: int
) -> None:
    counts, nodes = counted(experts, top_k, ranks, per_node, 8192 // ranks), ranks // per_node
    dedup = traffic(counts, two_hops=False, static_capacity=None, row_bytes=1)
    twohop = traffic(counts, two_hops=True, static_capacity=None, row_bytes=1)
    tokens = dedup.tokens
    assert tokens == 8192
    assert dedup.choices_off_node / tokens == pytest.approx(formula.copies_per_expert(top_k, nodes), rel=0.02)
    want = formula.copies_rank_to_other_node(experts, top_k, ranks, nodes)
    assert dedup.rows_off_node / tokens == pytest.approx(want, rel=0.02)
    assert twohop.rows_off_node / tokens == pytest.approx(formula.copies_off_set(experts, top_k, nodes), rel=0.02)


def test_static_form_sends_every_token_to_every_other_node() -> None:
    counts = counted(64, 2, 16, 8, 50)
    one = traffic(counts, two_hops=True, static_capacity=50, row_bytes=100)
    assert one.rows_off_node / one.tokens == 1.0
    assert one.needed_off_node < one.rows_off_node


def test_counters_add_up_and_start_again_once_read() -> None:
    counters = Counters()
    counters.add(3, Traffic(10, 40, 20, 18, 60, 100))
    counters.add(3, Traffic(10, 20, 10, 10, 30, 100))
    values = counters.take()[3].values()
    assert values == {
        "rows_off_rank": 3.0,
        "rows_off_node": 1.5,
        "rows_off_node_needed": 1.4,
        "choices_off_node": 4.5,
    }
    assert counters.take() == {}


def test_a_logging_step_gives_plain_numbers_to_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[int, dict[str, float]] = {}
    sink = SimpleNamespace(scalars=lambda step, values: taken.update({step: dict(values)}))
    state = publish.Session(publish.DispatchOptions(), interval=2, sink=sink)
    monkeypatch.setattr(publish, "_session", state)
    state.counters.add(0, Traffic(10, 40, 20, 20, 60, 2**30))
    publish.step_end(1)
    assert taken == {}
    publish.step_end(2)
    assert taken[2]["moe/rows_off_node/layer_0"] == 2.0
    assert taken[2]["moe/choices_off_node/max"] == 6.0
    assert taken[2]["step/dispatch_gib_off_node"] == 20.0


def _sent(rank: int, world: int, per_node: int, static: bool) -> tuple[int, int, dict[str, int]]:
    """Run one real dispatch; rows this rank sent off the node and off the rank, and the counters' view."""
    layout = Layout(world, rank, 64 // world, per_node)
    engine = Engine(layout, make_groups(layout, dist.group.WORLD, two_hops=True), static=static)
    tokens = 64
    ids = uniform_ids(tokens, 64, 8, rank)
    _, _, handle = engine.dispatch(torch.randn(tokens, 8), ids, torch.rand(tokens, 8))
    rail, node = handle.hops
    one = traffic(
        handle.counts.wait(), two_hops=True, static_capacity=tokens if static else None, row_bytes=handle.row_bytes
    )
    return rail.exchange.rows_out, rail.exchange.rows_out + node.exchange.rows_out, vars(one)


def _check_sent(world: int, per_node: int, static: bool) -> float:
    answers = run_ranks(_sent, world, per_node, static)
    counters = answers[0][2]
    assert sum(off_node for off_node, _, _ in answers) == counters["rows_off_node"]
    assert sum(off_rank for _, off_rank, _ in answers) == counters["rows_off_rank"]
    assert counters["choices_off_node"] / counters["tokens"] == pytest.approx(4.0, rel=0.05)
    return counters["rows_off_node"] / counters["tokens"]


@pytest.mark.parametrize("static", [False, True])
def test_counters_equal_the_rows_that_were_sent(static: bool) -> None:
    assert _check_sent(4, 2, static) <= 1.0


@pytest.mark.ranks
@pytest.mark.parametrize("static", [False, True])
def test_ep16_on_two_nodes_sends_at_most_one_row_a_token_off_the_node(static: bool) -> None:
    assert _check_sent(16, 8, static) <= 1.0
