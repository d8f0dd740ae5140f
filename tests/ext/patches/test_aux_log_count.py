"""Proof: the logged aux loss is the mean over the layers that add to it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.training.training as training
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "observe"))

from observe_training import train


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ({}, 4),
        ({"moe_layer_freq": 2}, 2),
        ({"moe_layer_freq": [0, 1, 1, 1]}, 3),
        ({"mtp_num_layers": 2}, 6),
        ({"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, 5),
        ({"mtp_num_layers": 2, "moe_layer_freq": [1, 1, 1, 0]}, 3),
        ({"mtp_num_layers": 1, "moe_layer_freq": 2}, 2),
        ({"hybrid_layer_pattern": "M*E-"}, 1),
        ({"hybrid_layer_pattern": "M*EE/*E/*E", "mtp_num_layers": 2}, 4),
        ({"hybrid_layer_pattern": "M*EE/*-/*-", "mtp_num_layers": 2}, 2),
    ],
    ids=str,
)
def test_layers_that_add_a_loss_are_counted(model: dict[str, Any], layers: int) -> None:
    args = {
        "num_layers": 4,
        "moe_layer_freq": 1,
        "mtp_num_layers": None,
        "mtp_use_repeated_layer": False,
        "hybrid_layer_pattern": None,
    }
    assert training.moe_aux_loss_layers(SimpleNamespace(**args | model)) == layers


@pytest.mark.parametrize("flags", ["--mtp-use-repeated-layer", "--moe-layer-freq [1,0]"])
def test_logged_loss_is_the_mean_of_the_layers(tmp_path: Path, flags: str) -> None:
    # The monitor takes a repeated layer's passes, like micro-batches, as one; without the patch 0.75 and 0.33.
    run = train(tmp_path, f"--mtp-num-layers 2 --train-iters 1 --global-batch-size 2 {flags}")
    (logged,) = re.findall(r"load_balancing_loss: (\S+)", run.log)
    assert float(logged) == pytest.approx(run.metrics(1)["moe/balance_loss/mean"], rel=1e-3)
