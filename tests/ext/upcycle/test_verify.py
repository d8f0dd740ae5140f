"""`upcycle verify` with real Megatron: good upcyclings pass, damaged ones fail and the layer is named."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import gpt
import numpy
import pytest
import torch
from gpt import Layout, Moe, Shape, build, load, moe_flags, save_dense, use_groups
from sabotage import sabotage
from test_accidents import Bomb

from megatron_ext.cli import main
from megatron_ext.runtime import cpu

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(not cpu.is_installed(), reason="verify runs under the CPU runtime"),
]
ONE = Layout()
SHAPE, SLICED = Shape(layers=3), Moe(16, 4, 16)
GOOD = {
    "full width": (Shape(layers=2), Moe(), []),
    "biases, tied": (Shape("gelu", biases=True, tied=True, layers=2), Moe(8, 4, 16), []),
    "mixed layers, shared expert": (Shape(layers=3), Moe(8, 2, 32, [0, 1, 1], {
        "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}), []),
    "sigmoid, expert bias, factor": (Shape("squared_relu", layers=2), Moe(8, 2, 64, 1, {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5}), []),
    "multi-token prediction": (Shape(layers=2, mtp=1), Moe(8, 4, 32), []),
    "bf16": (Shape(layers=2, dtype=torch.bfloat16), Moe(16, 4, 16), []),
    "Transformer Engine's names": (Shape(layers=2), Moe(), ["--transformer-impl", "transformer_engine"]),
}  # fmt: skip


def upcycle(shape: Shape, moe: Moe, root: Path, *flags: str) -> None:
    use_groups(ONE)
    save_dense(build(shape, ONE), root / "dense", shape)
    assert main(["upcycle", str(root / "dense"), str(root / "moe"), *moe_flags(moe), *flags]) == 0


def verify(root: Path, capsys: pytest.CaptureFixture[str], *, source: str = "dense", target: str = "moe",
           status: int = 0) -> dict[str, Any]:
    use_groups(ONE)
    capsys.readouterr()
    assert main(["upcycle", "verify", str(root / source), str(root / target), "--seq-length", "16", "--json"]) == status
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["good"] == (status == 0)
    return found


@pytest.mark.parametrize("name", GOOD)
def test_an_exact_upcycling_is_as_promised(name, tmp_path, capsys):
    shape, moe, flags = GOOD[name]
    upcycle(shape, moe, tmp_path, *flags)
    found = verify(tmp_path, capsys)
    assert found["promise"]["kind"] == "exact"
    gaps = found["differences"]
    low = shape.dtype == torch.bfloat16
    assert gaps["target_loss"] == pytest.approx(gaps["source_loss"], abs=1e-3 if low else 1e-5)
    assert [one["layer"] for one in gaps["layers"]] == [f"layer {n}" for n in range(shape.layers)]
    assert all(one["alone"] < (1e-2 if low else 1e-5) for one in gaps["layers"])
    assert found["survey"]["wrong"] == []
    slices = shape.ffn // moe.ffn
    for one in found["survey"]["experts"]:
        assert (one["count"], one["distinct"], one["kept"], one["silent"]) == (moe.experts, slices, slices, 0)


def test_a_scaled_upcycling_is_scaled_by_what_it_says(tmp_path, capsys):
    upcycle(SHAPE, SLICED, tmp_path, "--scaling", "none")
    found = verify(tmp_path, capsys)
    assert found["promise"]["kind"] == "scaled"
    assert found["promise"]["scale"] == 0.25
    assert [one["mlp_scale"] for one in found["differences"]["layers"]] == pytest.approx([0.25] * 3, abs=1e-4)
    assert abs(found["differences"]["target_loss"] - found["differences"]["source_loss"]) > 1e-3


@pytest.fixture(scope="module")
def made(world: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    upcycle(SHAPE, SLICED, root)
    return root


def zero_row(tensor: torch.Tensor) -> None:
    tensor.reshape(-1, tensor.shape[-1])[5] = 0


def negate_last_row(tensor: torch.Tensor) -> None:
    tensor.reshape(-1, tensor.shape[-1])[-1] *= -1


def test_a_zeroed_expert_row_is_found_with_its_layer(made, tmp_path, capsys):
    root = Path(shutil.copytree(made, tmp_path / "bad"))
    sabotage(root / "moe", "decoder.layers.mlp.experts.experts.linear_fc1.weight", (1, 3, 0, 0), zero_row)
    found = verify(root, capsys, status=1)
    (wrong,) = found["survey"]["wrong"]
    assert (wrong["layer"], wrong["expert"], wrong["rows"]) == ("layer 1", 3, [5])
    assert "layer 1, expert 3: mlp.experts.experts.linear_fc1.weight, row 5 differs" in found["reasons"][0]
    # The run shows it, too, and in this layer alone: those after it are only fed with its output.
    alone = [one["alone"] for one in found["differences"]["layers"]]
    assert alone[1] > 1e-3
    assert max(alone[0], alone[2]) < 1e-5
    assert found["differences"]["layers"][2]["hidden"] > 1e-3
    assert any(reason.startswith("layer 1: on the source's input") for reason in found["reasons"])
    experts = {one["layer"]: one for one in found["survey"]["experts"]}
    assert [experts[f"layer {n}"]["distinct"] for n in range(3)] == [4, 5, 4]


def test_a_changed_router_row_is_found_with_its_layer(made, tmp_path, capsys):
    root = Path(shutil.copytree(made, tmp_path / "bad"))
    sabotage(root / "moe", "decoder.layers.mlp.router.weight", (2, 0, 0), negate_last_row)
    found = verify(root, capsys, status=1)
    (wrong,) = found["survey"]["wrong"]
    assert (wrong["layer"], wrong["tensor"], wrong["rows"]) == ("layer 2", "mlp.router.weight", [15])
    # A slice lost its group: the function breaks in this layer.
    assert [one["alone"] > 1e-4 for one in found["differences"]["layers"]] == [False, False, True]


def test_people_see_the_verdict_and_its_reasons(made, tmp_path, capsys):
    root = Path(shutil.copytree(made, tmp_path / "bad"))
    use_groups(ONE)
    words = ["upcycle", "verify", str(root / "dense"), str(root / "moe")]
    assert main(words) == 0
    assert "verdict: as promised" in capsys.readouterr().out
    sabotage(root / "moe", "decoder.layers.mlp.router.weight", (0, 0, 0), zero_row)
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "NOT as promised" in said
    assert "layer 0: mlp.router.weight, row 5 differs" in said


def refusal(capsys: pytest.CaptureFixture[str], source: Path, target: Path, *flags: str) -> str:
    use_groups(ONE)
    assert main(["upcycle", "verify", str(source), str(target), *flags]) == 64
    return capsys.readouterr().err


def test_what_cannot_be_compared_is_refused(made, tmp_path, capsys, monkeypatch):
    assert "no checkpoint here" in refusal(capsys, tmp_path / "none", made / "moe")
    assert "same checkpoint" in refusal(capsys, made / "moe", made / "moe")
    assert "not an MoE" in refusal(capsys, made / "moe", made / "dense")
    assert "the batch is empty" in refusal(capsys, made / "dense", made / "moe", "--sequences", "0")
    assert "no data here" in refusal(capsys, made / "dense", made / "moe", "--data", str(tmp_path / "text"))
    use_groups(ONE)
    torch.manual_seed(99)
    save_dense(build(SHAPE, ONE), tmp_path / "other", SHAPE)
    assert "does not come from this source" in refusal(capsys, tmp_path / "other", made / "moe")
    save_dense(build(Shape(layers=2), ONE), tmp_path / "shallow", Shape(layers=2))
    assert "different shapes" in refusal(capsys, tmp_path / "shallow", made / "moe")
    monkeypatch.setattr(gpt, "VOCAB", 128)
    save_dense(build(SHAPE, ONE), tmp_path / "wide", SHAPE)
    assert "different vocabularies" in refusal(capsys, tmp_path / "wide", made / "moe")
    root = Path(shutil.copytree(made, tmp_path / "copy"))
    (root / "moe" / "release" / "upcycle.json").unlink()
    assert "does not say how it was made" in refusal(capsys, root / "dense", root / "moe")


def test_the_batch_can_come_from_data(made, tmp_path, capsys):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for start in (0, 20):
        builder.add_document(torch.arange(start, start + 40) % gpt.VOCAB, [40])
    builder.finalize(f"{prefix}.idx")
    use_groups(ONE)
    words = ["upcycle", "verify", str(made / "dense"), str(made / "moe"), "--data", str(prefix), "--json"]
    assert main([*words, "--sequences", "3", "--seq-length", "16"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["differences"]
    text = torch.cat([torch.arange(40), torch.arange(20, 31)]) % gpt.VOCAB
    (dense,) = build(SHAPE, ONE)
    load([dense], made / "dense" / "iter_0000012")
    rows = text.reshape(3, 17)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    with torch.no_grad():
        wanted = dense.eval()(tokens, torch.arange(16).expand(3, 16), None, labels=labels).mean()
    assert found["source_loss"] == pytest.approx(float(wanted), abs=1e-5)
    assert "data are too few" in refusal(capsys, made / "dense", made / "moe", "--data", str(prefix))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    builder.add_document(torch.full((400,), gpt.VOCAB), [400])
    builder.finalize(f"{prefix}.idx")
    assert "another vocabulary" in refusal(capsys, made / "dense", made / "moe", "--data", str(prefix))


def test_code_in_the_target_is_not_run(made, tmp_path, capsys):
    root = Path(shutil.copytree(made, tmp_path / "bad"))
    next((root / "moe").rglob(".metadata")).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    assert "posix.mkdir" in refusal(capsys, root / "dense", root / "moe")
    assert not (tmp_path / "ran").exists()
