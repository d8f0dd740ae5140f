"""Slot tables, counts and expert order on hand-made routings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_ext.dispatch import autograd, routing
from megatron_ext.dispatch.counts import Counts
from megatron_ext.dispatch.errors import DispatchError
from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.wire import RowFormat

# Two nodes of two ranks, two experts a rank: rank 0 holds 0 1, rank 1 holds 2 3 | rank 2 holds 4 5, rank 3 holds 6 7.
LAYOUT = Layout(world=4, rank=1, num_local_experts=2, ranks_per_node=2)
IDS = torch.tensor([[0, 1, 6], [2, 3, -1], [1, 4, 5], [-1, -1, -1]])


def test_layout_names_rail_and_node() -> None:
    assert (LAYOUT.node, LAYOUT.local_rank, LAYOUT.rail, LAYOUT.node_ranks) == (0, 1, (1, 3), (0, 1))


@pytest.mark.parametrize("ranks_per_node", [0, 3, 8])
def test_ranks_that_do_not_fill_nodes_are_refused_by_number(ranks_per_node: int) -> None:
    with pytest.raises(DispatchError, match=f"4 ranks, {ranks_per_node} on a node"):
        Layout(4, 0, 2, ranks_per_node)


def test_map_to_ids_keeps_chosen_experts_in_order() -> None:
    chosen = torch.zeros(4, 8, dtype=torch.bool)
    for token, row in enumerate(IDS.tolist()):
        chosen[token, [e for e in row if e >= 0]] = True
    assert torch.equal(routing.map_to_ids(chosen, 3), IDS)


def test_map_to_ids_pads_when_fewer_experts_than_choices() -> None:
    assert routing.map_to_ids(torch.tensor([[True, False]]), 3).tolist() == [[0, -1, -1]]


def test_chosen_weights_and_their_gradient_leave_out_what_was_not_chosen() -> None:
    chosen = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])
    probs = torch.tensor([[0.1, 0.2, 0.3], [float("nan"), 0.5, 0.6], [0.7, 0.8, 0.9]], requires_grad=True)
    ids, weights = autograd.choose(chosen, probs, 2)
    assert ids.tolist() == [[0, 2], [-1, -1], [1, -1]]
    assert torch.equal(weights, torch.tensor([[0.1, 0.3], [0.0, 0.0], [0.8, 0.0]]))
    weights.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert torch.equal(probs.grad, torch.tensor([[1.0, 0, 2], [0, 0, 0], [0, 5, 0]]))


@pytest.mark.parametrize(("align", "want"), [(0, [2, 1, 1]), (4, [4, 4, 4])])
def test_expert_order_counts_rows_with_their_padding(align: int, want: list[int]) -> None:
    local_ids = torch.tensor([[-2, 0], [1, 2], [-1, 0]])
    assert routing.expert_slots(local_ids, 3, align=align).counts.tolist() == want


def test_sort_choices_moves_weights_and_puts_empty_choices_last() -> None:
    ids, weights = routing.sort_choices(torch.tensor([[5, -1, 2]]), torch.tensor([[0.5, 0.1, 0.2]]))
    assert ids.tolist() == [[2, 5, -1]]
    assert torch.equal(weights, torch.tensor([[0.2, 0.5, 0.1]]))


def test_destinations_of_ranks_and_nodes() -> None:
    assert routing.all_ranks(LAYOUT).of(IDS).tolist() == [[0, 0, 3], [1, 1, -1], [0, 2, 2], [-1, -1, -1]]
    assert routing.all_nodes(LAYOUT).of(IDS).tolist() == [[0, 0, 1], [0, 0, -1], [0, 1, 1], [-1, -1, -1]]
    assert routing.node_ranks(LAYOUT).of(IDS).tolist() == [[0, 0, -1], [1, 1, -1], [0, -1, -1], [-1, -1, -1]]


def test_slots_are_ordered_by_destination_then_row_with_own_rows_last() -> None:
    table = routing.assign_slots(IDS, routing.all_ranks(LAYOUT))
    # Output rows: rank 0 gets tokens 0 and 2, rank 2 gets 2, rank 3 gets 0, own rank 1 gets 1.
    assert table.slots.tolist() == [[0, -1, 3], [4, -1, -1], [1, 2, -1], [-1, -1, -1]]
    assert table.counts.tolist() == [2, 1, 1, 1]


def test_slots_of_no_rows_are_empty() -> None:
    table = routing.assign_slots(torch.empty(0, 3, dtype=torch.long), routing.all_ranks(LAYOUT))
    assert table.slots.shape == (0, 3)
    assert table.counts.tolist() == [0, 0, 0, 0]


def test_fixed_slots_give_every_destination_a_block() -> None:
    slots = routing.fixed_slots(IDS, routing.all_nodes(LAYOUT), 10)
    assert slots.tolist() == [[10, -1, 0], [11, -1, -1], [12, 2, -1], [-1, -1, -1]]


@pytest.mark.parametrize(("align", "want"), [(0, [[-1, 0], [2, 3], [-1, 1]]), (4, [[-1, 0], [4, 8], [-1, 1]])])
def test_expert_order_groups_rows_by_expert(align: int, want: list[list[int]]) -> None:
    local_ids = torch.tensor([[-2, 0], [1, 2], [-1, 0]])
    assert routing.expert_slots(local_ids, 3, align=align).slots.tolist() == want


def _counts(vectors: list[torch.Tensor], layout: Layout) -> Counts:
    return Counts(layout, np.stack([v.numpy().astype(np.int64) for v in vectors]))


def test_counts_give_the_split_sizes_of_every_hop() -> None:
    layouts = [Layout(4, r, 2, 2) for r in range(4)]
    ids = [IDS, IDS[:1], IDS[:0], IDS[2:]]
    vectors = [routing.count_vector(i, layout) for i, layout in zip(ids, layouts, strict=True)]
    counts = [_counts(vectors, layout) for layout in layouts]
    assert counts[0].tokens.tolist() == [4, 1, 0, 2]
    assert counts[0].rank_splits() == ([2, 1, 1, 1], [2, 1, 0, 1])
    # Along rail 0 (ranks 0 and 2): rank 0 has 3 tokens for its own node, 2 for the other.
    assert counts[0].rail_splits() == ([3, 2], [3, 0])
    # Rank 3 is the relay of rail 1 in node 1 and holds rank 1's one row (for rank 3) and its own (for rank 2).
    assert counts[3].node_splits() == ([1, 1], [1, 1])
    assert counts[0].tokens_per_local_expert().tolist() == [2, 4]
    counts[0].check(vectors[0].numpy().astype(np.int64))


@pytest.mark.parametrize(
    ("rank", "column", "why"),
    [(0, 1, "came back changed"), (2, 3, "do not add up"), (3, -1, "do not add up")],
)
def test_a_corrupted_count_is_caught_and_names_the_rank(rank: int, column: int, why: str) -> None:
    layout = Layout(4, 0, 2, 2)
    vectors = [routing.count_vector(IDS, layout) for _ in range(4)]
    counts = _counts(vectors, layout)
    counts.matrix[rank, column] += 1
    with pytest.raises(DispatchError, match=f"counts of rank {rank}(.|\n)*{why}"):
        counts.check(vectors[0].numpy().astype(np.int64))


def test_more_rows_than_tokens_is_caught_even_with_a_right_check_sum() -> None:
    layout = Layout(4, 0, 2, 2)
    vectors = [routing.count_vector(IDS, layout) for _ in range(4)]
    counts = _counts(vectors, layout)
    counts.matrix[1, 2] += 100
    counts.matrix[1, -1] += 100
    with pytest.raises(DispatchError, match="more rows for a destination than it has tokens"):
        counts.check(vectors[0].numpy().astype(np.int64))


@pytest.mark.parametrize("hidden", [1, 7, 2048])
@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("num_experts", [8, 40_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_rows_give_back_what_went_in(hidden: int, top_k: int, num_experts: int, dtype: torch.dtype) -> None:
    form = RowFormat(hidden, top_k, dtype, torch.float32, num_experts)
    x, weights = torch.randn(5, hidden).to(dtype), torch.rand(5, top_k)
    ids = torch.randint(-1, num_experts, (5, top_k))
    rows = torch.zeros(5, form.row_bytes, dtype=torch.uint8)
    form.hidden_view(rows)[:] = x
    form.meta_view(rows)[:] = form.pack_meta(weights, ids)
    got_weights, got_ids = form.unpack_meta(rows)
    assert torch.equal(form.hidden_view(rows), x)
    assert torch.equal(got_weights, weights)
    assert torch.equal(got_ids, ids)
    assert form.row_bytes % 16 == 0


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_unpacked_weights_and_ids_share_no_memory_with_the_rows(num_rows: int) -> None:
    """Overlap frees the rows while the ids are still needed; a single row was once shared."""
    form = RowFormat(4, 2, torch.float32, torch.float32, 40_000)
    rows = torch.zeros(num_rows, form.row_bytes, dtype=torch.uint8)
    weights, ids = torch.rand(num_rows, 2), torch.full((num_rows, 2), 7)
    form.meta_view(rows)[:] = form.pack_meta(weights, ids)
    got_weights, got_ids = form.unpack_meta(rows)
    rows.fill_(255)
    assert torch.equal(got_weights, weights)
    assert torch.equal(got_ids, ids)


def test_a_row_of_the_handbooks_model_costs_little_more_than_its_hidden_values() -> None:
    form = RowFormat(2048, 8, torch.bfloat16, torch.float32, 64)
    assert (form.hidden_bytes, form.row_bytes) == (4096, 4144)
