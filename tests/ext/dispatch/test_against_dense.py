"""Dispatch, experts, combine and their gradients over gloo ranks, against a dense mixture of experts in one process."""

from __future__ import annotations

import pytest
from cases import run_cases
from gloo_world import run_ranks


@pytest.mark.parametrize("ep", [2, 4])
def test_random_shapes_equal_dense(ep: int) -> None:
    done = run_ranks(run_cases, 4, ep, list(range(25)), {})
    assert done == [25 * (4 // ep)] * 4


@pytest.mark.ranks
@pytest.mark.parametrize("ep", [2, 4, 8, 16])
def test_two_hundred_random_shapes_equal_dense(ep: int) -> None:
    groups = 16 // ep
    run_ranks(run_cases, 16, ep, list(range(100, 100 + max(25, 200 // groups // 4))), {}, timeout_s=500)
