"""Dispatch, experts, combine and their gradients over gloo ranks, against a dense mixture of experts in one process."""

from __future__ import annotations

import pytest
import torch
from cases import Case, cases_of_group, run_cases
from gloo_world import run_ranks

MANY = 16  # ranks of the long form: as many groups of each size run side by side
SEEDS = {2: list(range(100, 125)), 4: list(range(100, 130)), 8: list(range(200, 250)), 16: list(range(200, 270))}


def _drawn(ep: int) -> list[Case]:
    return [case for group in range(MANY // ep) for case in cases_of_group(group, ep, SEEDS[ep])]


@pytest.mark.parametrize("ep", [2, 4])
def test_random_shapes_equal_dense(ep: int) -> None:
    done = run_ranks(run_cases, 4, ep, list(range(25)), {})
    assert done == [25 * (4 // ep)] * 4


@pytest.mark.ranks
@pytest.mark.parametrize("ep", list(SEEDS))
def test_hundreds_of_random_shapes_equal_dense(ep: int) -> None:
    run_ranks(run_cases, MANY, ep, SEEDS[ep], {}, timeout_s=500)


@pytest.mark.parametrize("ep", list(SEEDS))
def test_the_long_form_draws_every_kind_of_shape(ep: int) -> None:
    cases = _drawn(ep)
    two_hops = {(c.ranks_per_node, c.static) for c in cases if c.two_hops}
    assert two_hops == {(n, form) for n in (1, 2, 4, 8) if n <= ep for form in (None, True, False)}
    assert {c.static for c in cases if not c.two_hops} == {None, True, False}
    assert {c.num_experts for c in cases} == {n for n in (8, 16, 32, 64, 128, 256) if n % ep == 0}
    assert {c.top_k for c in cases} == set(range(1, 9))
    for size in (n for n in (2, 4, 8) if n <= ep):
        on_nodes = [c for c in cases if c.two_hops and c.ranks_per_node == size]
        assert {c.expert_tp for c in on_nodes} == {1, 2}
        assert {c.dtype for c in on_nodes} == {torch.float32, torch.bfloat16}
        assert any(c.empty == 1.0 for c in on_nodes), "no row at all"
        assert any(0 < c.empty < 1 for c in on_nodes), "tokens and choices left out"
        assert any(0 in c.tokens and max(c.tokens) for c in on_nodes), "a rank without tokens"
        assert any(len(set(c.tokens)) > 1 and c.static for c in on_nodes), "unequal numbers of tokens, static"
        assert any(c.align for c in on_nodes), "padded experts"
        assert any(c.recompute for c in on_nodes), "recompute"
        assert any(c.skew for c in on_nodes), "skew"


def test_the_long_form_draws_more_than_two_hundred_shapes() -> None:
    assert sum(len(_drawn(ep)) for ep in SEEDS) >= 400
    assert min(len(_drawn(ep)) for ep in SEEDS) >= 70
