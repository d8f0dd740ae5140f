"""Rows that real processes hand to their collectives equal the counters, and the formula in the six known cases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_world import run_ranks

from megatron_ext.dispatch import formula
from megatron_ext.dispatch.baseline import row_per_choice_dispatch
from megatron_ext.dispatch.counters import traffic
from megatron_ext.dispatch.engine import Engine
from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.transport import make_groups

HIDDEN = 8
# experts, top-k, ranks, ranks a node (1: a rank counts as a node), tokens a rank.
SMALL = [(64, 8, 2, 1, 512), (64, 8, 4, 2, 256)]
KNOWN = [
    (64, 8, 2, 1, 512),
    (64, 8, 8, 1, 128),
    (64, 8, 16, 8, 64),
    (256, 8, 32, 8, 32),
    (256, 8, 64, 8, 32),
    (8, 2, 8, 1, 256),
]


@dataclass
class Tape:
    """What this rank gave to collectives for other ranks, seen from outside of our code.

    Args:
        rank: In the world.
        per_node: Ranks of a node.
        rows: Rows off the node, and off the rank. Rows narrower than a token (counts, weights) are left out.
    """

    rank: int
    per_node: int
    rows: list[int] = field(default_factory=lambda: [0, 0])

    def note(self, peer: int, rows: int) -> None:
        self.rows[0] += rows * (peer // self.per_node != self.rank // self.per_node)
        self.rows[1] += rows * (peer != self.rank)

    @contextmanager
    def running(self, row_bytes: int) -> Iterator[None]:
        """Note what passes; `row_bytes` tells the rows of a transfer without split sizes."""
        all_to_all, batch = dist.all_to_all_single, dist.batch_isend_irecv

        def noted_all_to_all(out: Any, given: Any, back: list[int], splits: list[int], *, group: Any) -> Any:
            if given[:1].nbytes >= HIDDEN * 4 or not len(given):
                for peer, rows in zip(dist.get_process_group_ranks(group), splits, strict=True):
                    self.note(peer, rows)
            return all_to_all(out, given, back, splits, group=group)

        def noted_batch(steps: list[Any]) -> Any:
            for step in steps:
                if step.op is dist.isend:
                    self.note(step.peer, step.tensor.nbytes // row_bytes)
            return batch(steps)

        dist.all_to_all_single, dist.batch_isend_irecv = noted_all_to_all, noted_batch
        try:
            yield
        finally:
            dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batch


def _sent(
    rank: int, world: int, per_node: int, experts: int, top_k: int, tokens: int
) -> dict[str, tuple[list[int], dict[str, int]]]:
    """Dispatch the same tokens with each dispatcher: rows that this rank sent, and the counters' view of all ranks."""
    layout = Layout(world, rank, experts // world, per_node)
    made = torch.Generator().manual_seed(rank)
    ids = torch.rand(tokens, experts, generator=made).topk(top_k, dim=1).indices.sort(dim=1).values
    x, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, top_k)
    found: dict[str, tuple[list[int], dict[str, int]]] = {}
    tape = Tape(rank, per_node)
    with tape.running(1):
        row_per_choice_dispatch(layout, dist.group.WORLD, x, ids, weights)
    found["alltoall"] = (tape.rows, {})
    groups = {two_hops: make_groups(layout, dist.group.WORLD, two_hops=two_hops) for two_hops in (False, True)}
    for name, two_hops, static in (("dedup", False, False), ("twohop", True, False), ("twohop-static", True, True)):
        engine = Engine(layout, groups[two_hops], static=static)
        row_bytes = found["dedup"][1]["row_bytes"] if static else 1
        tape = Tape(rank, per_node)
        with tape.running(row_bytes):
            handle = engine.dispatch(x, ids, weights)[2]
        one = traffic(
            handle.counts.wait(),
            two_hops=engine.two_hops,
            static_capacity=tokens if static else None,
            row_bytes=handle.row_bytes,
        )
        found[name] = (tape.rows, vars(one))
    return found


def _rows_a_token(experts: int, top_k: int, ranks: int, per_node: int, tokens: int) -> dict[str, float]:
    """Rows a token off the node by dispatcher, as sent; checked against the counters, row by row."""
    answers = run_ranks(_sent, ranks, per_node, experts, top_k, tokens)
    measured = {}
    for name in answers[0]:
        off_node, off_rank = (sum(answer[name][0][at] for answer in answers) for at in (0, 1))
        measured[name] = off_node / (ranks * tokens)
        if name != "alltoall":
            counters = answers[0][name][1]
            assert (off_node, off_rank) == (counters["rows_off_node"], counters["rows_off_rank"]), name
            alltoall = sum(answer["alltoall"][0][0] for answer in answers)
            assert counters["choices_off_node"] == alltoall
    return measured


def _check(experts: int, top_k: int, ranks: int, per_node: int, tokens: int) -> None:
    rows, nodes = _rows_a_token(experts, top_k, ranks, per_node, tokens), ranks // per_node
    assert rows["alltoall"] == pytest.approx(formula.copies_per_expert(top_k, nodes), rel=0.03)
    assert rows["dedup"] == pytest.approx(formula.copies_rank_to_other_node(experts, top_k, ranks, nodes), rel=0.03)
    assert rows["twohop"] == pytest.approx(formula.copies_off_set(experts, top_k, nodes), rel=0.03)
    assert rows["twohop-static"] == nodes - 1
    if (ranks, per_node) == (16, 8):
        assert max(rows["twohop"], rows["twohop-static"]) <= 1.0
        assert rows["alltoall"] >= 3.9


@pytest.mark.parametrize(("experts", "top_k", "ranks", "per_node", "tokens"), SMALL)
def test_rows_sent_by_a_few_ranks(experts: int, top_k: int, ranks: int, per_node: int, tokens: int) -> None:
    _check(experts, top_k, ranks, per_node, tokens)


@pytest.mark.ranks
@pytest.mark.parametrize(("experts", "top_k", "ranks", "per_node", "tokens"), KNOWN)
def test_rows_sent_equal_counters_and_formula(experts: int, top_k: int, ranks: int, per_node: int, tokens: int) -> None:
    """At 16 ranks on two nodes: at most one row a token leaves the node, against four with `alltoall`."""
    _check(experts, top_k, ranks, per_node, tokens)
