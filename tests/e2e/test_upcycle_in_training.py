"""--moe-use-upcycling in a real training start on two expert-parallel ranks: slices, mixed layers, in fp32 and bf16."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from megatron_run import MOCK, MODEL, TRAIN, consumed, losses, train

TRACKER = "latest_checkpointed_iteration.txt"
# Slices of 8 from the dense width of 64, so granularity 8 with top-8; the first of two layers stays dense.
SLICES = [
    *("--num-experts", "16", "--moe-router-topk", "8", "--moe-ffn-hidden-size", "8", "--moe-layer-freq", "[0,1]"),
    *("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", "--moe-router-dtype", "fp32"),
    *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("precision", "gap"), [([], 1e-5), (["--bf16"], 1e-3)], ids=["fp32", "bf16"])
def test_slices_start_at_the_dense_loss(precision: list[str], gap: float, tmp_path: Path) -> None:
    common = [*MODEL, *TRAIN, *MOCK, *precision, "--save-interval", "4"]
    dense = train([*common, "--train-iters", "10", "--save", str(tmp_path / "dense")])
    assert dense.returncode == 0, dense.stdout[-3000:]
    source = tmp_path / "source"
    shutil.copytree(tmp_path / "dense", source)
    (source / TRACKER).write_text("8")
    moe = train([*common, *SLICES, "--train-iters", "2", "--load", str(source), "--save", str(tmp_path / "moe"),
                 "--moe-use-upcycling"])  # fmt: skip
    assert moe.returncode == 0, moe.stdout[-3000:]
    first, next_dense = float(losses(moe.stdout)[1]), float(losses(dense.stdout)[9])
    assert first == pytest.approx(next_dense, abs=gap)
    # The batch is the one that the dense run saw next, and it trains on from there.
    assert consumed(moe.stdout)[1] == consumed(dense.stdout)[9]
    assert abs(next_dense - float(losses(dense.stdout)[8])) > gap
