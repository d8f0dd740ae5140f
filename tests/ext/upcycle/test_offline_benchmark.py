"""The benchmark's dense checkpoint is one that Megatron loads, and the size that `plan` says is the MoE's."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from gpt import VOCAB, Layout, Moe, Shape, build, load, loss, moe_flags, use_groups

from megatron_ext.cli import main
from megatron_ext.plan import parameters
from megatron_ext.plan.parameters import ModelShape

MOE = Moe(16, 4, 16)


@pytest.mark.usefixtures("world")
def test_dense_checkpoint_loads_and_the_plan_knows_the_size(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("upcycle_offline", root / "benchmarks/upcycle_offline.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    planned = ModelShape(4, 32, 64, 4, VOCAB)
    benchmark.make_dense(tmp_path / "dense", planned, std=0.3, dtype_name="float32")
    use_groups(Layout())
    shape = Shape(tied=True)
    dense = build(shape, Layout())
    load(dense, tmp_path / "dense/iter_0000001")
    before = loss(dense, shape)
    assert main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "moe"), *moe_flags(MOE), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    moe = replace(planned, num_experts=16, topk=4, moe_ffn=16, moe_layers=4)
    assert said["bytes"] == parameters.checkpoint_bytes(moe, value_bytes=4)
    made = build(shape, Layout(), MOE)
    load(made, tmp_path / "moe/release")
    assert loss(made, shape) == pytest.approx(before, abs=1e-5)

    words = ["plan", "upcycle", "--dense", str(tmp_path / "dense"), "--tokens", "1M", "--num-experts", "16",
             "--router-topk", "4", "--value-bytes", "4", "--json"]  # fmt: skip
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["checkpoint_bytes"] == said["bytes"]
    assert plan["dense_tokens"] == 512 * 4096
