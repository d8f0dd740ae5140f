"""The first loss of the MoE is the dense one, over shapes and parallel layouts, on 4 real ranks over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matrix import CASES, FEW, SHAPES, run_in_child


def check(name: str, found: object) -> None:
    """Compare the losses; the weights of the path inside training must be the offline path's, bit for bit."""
    assert isinstance(found, dict), found
    dense, moe, fresh = (torch.tensor(found[which]) for which in ("dense", "moe", "fresh"))
    gap = 1e-3 if name.split(" / ")[0].endswith("bf16") else 1e-5
    assert float(moe.mean()) == pytest.approx(float(dense.mean()), abs=gap), SHAPES[name.split(" / ")[0]]
    assert found["apart"] == 0.0, "the path inside training gives other bits than the offline one"
    # Before loading, the losses of the micro-batches are others: the comparison can fail.
    assert float((fresh - dense).abs().max()) > 5 * gap


def test_a_few_configurations(tmp_path: Path, root: Path) -> None:
    results = run_in_child(FEW, tmp_path, root)
    for name in FEW:
        check(name, results.get(name, "not reached"))


def test_the_matrix_is_large_enough() -> None:
    assert len(CASES) >= 40
    assert set(FEW) <= set(CASES)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, root: Path) -> dict[str, object]:
    return run_in_child(CASES, tmp_path_factory.mktemp("matrix"), root)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_first_loss_is_the_dense_one(results: dict[str, object], name: str) -> None:
    check(name, results.get(name, "not reached"))
