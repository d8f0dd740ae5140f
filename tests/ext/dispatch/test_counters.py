"""Rows counted on drawn routings against the closed formula of the six known cases, and the counters on their way.

`test_rows_sent.py` holds the counters against what the collectives of real processes carry.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_ext.dispatch import formula, publish, routing
from megatron_ext.dispatch.counters import Counters, Traffic, traffic
from megatron_ext.dispatch.counts import Counts
from megatron_ext.dispatch.layout import Layout

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
