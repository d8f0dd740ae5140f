"""The monitor's mean of the balance losses is the aux loss that Megatron logs, also where layers repeat."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from observe_training import train


@pytest.mark.parametrize("flags", ["--mtp-use-repeated-layer", "--moe-layer-freq [1,0]"])
def test_logged_loss_is_the_mean_of_the_layers(tmp_path: Path, flags: str) -> None:
    # The monitor takes a repeated layer's passes, like micro-batches, as one; Megatron alone logs 0.75 and 0.33 of it.
    run = train(tmp_path, f"--mtp-num-layers 2 --train-iters 1 --global-batch-size 2 {flags}")
    (logged,) = re.findall(r"load_balancing_loss: (\S+)", run.log)
    assert float(logged) == pytest.approx(run.metrics(1)["moe/balance_loss/mean"], rel=1e-3)
