"""Proof of upcycle-mixed-layers: a model with dense and MoE layers is upcycled inside training and keeps its loss."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from megatron.core.transformer.moe import upcycling_utils

sys.path.insert(0, str(Path(__file__).parents[1] / "upcycle"))
from gpt import Layout, Moe, Shape, build, loss, use_groups


@pytest.mark.usefixtures("world")
def test_mixed_layers_keep_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ext.upcycle import in_training

    monkeypatch.setattr(in_training, "_run_choices", lambda scaling, seed: (scaling, 1))
    shape, layout = Shape(layers=3), Layout()
    use_groups(layout)
    moe_flags = {"moe_shared_expert_intermediate_size": 16, "moe_router_topk_scaling_factor": 2.5}
    dense, moe = build(shape, layout), build(shape, layout, Moe(8, 4, 16, [0, 1, 1], moe_flags))
    state = upcycling_utils.upcycle_state_dict(moe, dense)
    moe[0].load_state_dict(state["model"], strict=True)
    assert loss(moe, shape) == pytest.approx(loss(dense, shape), abs=1e-5)
