"""One rank: a real dense GPT, its checkpoint upcycled by the command, loaded by Megatron, run on the same batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpt import Layout, Moe, Shape, build, load, loss, moe_flags, save_dense, use_groups

from megatron_ext.cli import main
from megatron_ext.experts import switch

ONE = Layout()
CASES = {
    "full width": (Shape(), Moe()),
    "sliced, top-8 of 64": (Shape(), Moe(64, 8, 8)),
    "sliced gelu with biases, tied": (Shape("gelu", biases=True, tied=True), Moe(8, 4, 16)),
    "mixed layers, shared expert, gate": (
        Shape(), Moe(8, 2, 32, [0, 1, 1, 0],
                     {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True})),
    "sigmoid, expert bias, scaling factor": (
        Shape("squared_relu"), Moe(8, 2, 64, 1, {"moe_router_score_function": "sigmoid",
                                                 "moe_router_enable_expert_bias": True,
                                                 "moe_router_topk_scaling_factor": 2.5})),
    "every second layer, pre-softmax": (Shape(), Moe(4, 2, 64, 2, {"moe_router_pre_softmax": True})),
    "multi-token prediction": (Shape(mtp=1), Moe(8, 4, 32)),
    "bf16": (Shape(dtype=torch.bfloat16), Moe(16, 4, 16)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("world")
def test_first_loss_is_the_dense_one(name: str, tmp_path: Path):
    shape, moe = CASES[name]
    use_groups(ONE)
    dense = build(shape, ONE)
    before = loss(dense, shape)
    save_dense(dense, tmp_path / "dense", shape)
    assert main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "moe"), *moe_flags(moe)]) == 0
    made = build(shape, ONE, moe)
    assert abs(loss(made, shape) - before) > 5e-3  # before loading: the comparison can fail
    load(made, tmp_path / "moe" / "release")
    assert loss(made, shape) == pytest.approx(before, abs=1e-3 if shape.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("name", ["sliced, top-8 of 64", "mixed layers, shared expert, gate", "bf16"])
@pytest.mark.usefixtures("world")
def test_first_loss_with_grouped_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(switch, "_chosen", "torch")
    test_first_loss_is_the_dense_one(name, tmp_path)
    made = build(CASES[name][0], ONE, CASES[name][1])
    assert "TorchGroupedMLP" in {type(module).__name__ for chunk in made for module in chunk.modules()}
