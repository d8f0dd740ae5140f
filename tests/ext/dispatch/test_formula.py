"""The formula against DISPATCH's table and against counting."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.dispatch import formula, reference

TABLE = [
    # experts, top-k, ranks, nodes: off-set copies per expert, per rank, per node (None: one set is a rank)
    (64, 8, 2, 2, 4.0, 0.998, 0.998),
    (64, 8, 8, 8, 7.0, 4.753, 4.753),
    (64, 8, 16, 2, 4.0, 3.375, 0.998),
    (256, 8, 32, 4, 6.0, 5.45, 2.711),
    (256, 8, 64, 8, 7.0, 6.716, 4.633),
    (8, 2, 8, 8, 1.75, 1.75, 1.75),
]


@pytest.mark.parametrize(("experts", "top_k", "ranks", "nodes", "per_expert", "per_rank", "per_node"), TABLE)
def test_formula_gives_the_published_table(
    experts: int, top_k: int, ranks: int, nodes: int, per_expert: float, per_rank: float, per_node: float
) -> None:
    assert formula.copies_per_expert(top_k, nodes) == pytest.approx(per_expert, abs=5e-4)
    assert formula.copies_rank_to_other_node(experts, top_k, ranks, nodes) == pytest.approx(per_rank, abs=6e-4)
    assert formula.copies_off_set(experts, top_k, nodes) == pytest.approx(per_node, abs=6e-4)


@pytest.mark.parametrize(("experts", "top_k", "ranks", "nodes"), [row[:4] for row in TABLE])
def test_counted_rows_agree_with_the_formula(experts: int, top_k: int, ranks: int, nodes: int) -> None:
    made = torch.Generator().manual_seed(1)
    tokens = 3000
    ids = torch.rand(tokens, experts, generator=made).topk(top_k, dim=1).indices.sort(dim=1).values
    size = ranks // nodes
    for per, want in (
        ("choice", formula.copies_per_expert(top_k, nodes)),
        ("rank", formula.copies_rank_to_other_node(experts, top_k, ranks, nodes)),
        ("set", formula.copies_off_set(experts, top_k, nodes)),
    ):
        rows = reference.rows_off_set(ids, 0, num_local_experts=experts // ranks, set_size=size, per=per)
        assert rows / tokens == pytest.approx(want, rel=0.03)
