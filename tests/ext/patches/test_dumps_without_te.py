"""Proof of dumps-without-te: Megatron's own dumps work on the local spec and count a recomputed token once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router_trace import RouterTracer
from megatron.training import activation_logging
from routers import backward, forward, gpt

pytestmark = pytest.mark.usefixtures("world")

RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.fixture(autouse=True)
def _own_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_logging, "_LOGGER", None)



def test_activations_are_dumped(tmp_path: Path) -> None:
    model = gpt(num_layers=2)
    activation_logging.enable_activation_logging([model], str(tmp_path))
    forward(model)
    seen = activation_logging._require_logger()._activations_state_dict["model_chunk0"]
    activation_logging.disable_activation_logging()
    assert seen["decoder.layers.1.mlp.router/output1"].shape == (32, 8)
    assert "decoder.layers.0.self_attention.linear_qkv/input0" in seen


@pytest.mark.parametrize("options", [{}, RECOMPUTED], ids=["plain", "recomputed"])
def test_tokens_per_expert_are_written_once(tmp_path: Path, options: dict[str, Any]) -> None:
    model = gpt(num_layers=2, **options)
    activation_logging.enable_tokens_per_expert_logging([model], str(tmp_path))
    for seed in (1, 2):  # two micro-batches
        backward(forward(model, seed=seed).sum())
    activation_logging.save_tokens_per_expert(7)
    activation_logging.disable_tokens_per_expert_logging()
    lines = [json.loads(line) for line in (tmp_path / "tokens_per_expert" / "rank0.jsonl").read_text().splitlines()]
    assert [(line["iter"], line["block"], line["layer"]) for line in lines] == [(7, "decoder", 0), (7, "decoder", 1)]
    for line in lines:
        assert [sum(counts) for counts in line["tpe"]] == [64, 64]
        assert {len(counts) for counts in line["tpe"]} == {8}


@pytest.mark.parametrize("options", [{}, RECOMPUTED], ids=["plain", "recomputed"])
def test_routing_trace_has_one_record_a_layer(tmp_path: Path, options: dict[str, Any]) -> None:
    model = gpt(num_layers=2, **options)
    tracer = RouterTracer(str(tmp_path), max_steps=1, rank=0, training_mode=True)
    tracer.register_hooks(model)
    backward(forward(model).sum())
    assert sorted(record["layer"] for record in tracer.records) == [0, 1]


def test_evaluation_is_traced(tmp_path: Path) -> None:
    model = gpt(num_layers=2, **RECOMPUTED).eval()
    tracer = RouterTracer(str(tmp_path), max_steps=1, rank=0, training_mode=True)
    tracer.register_hooks(model)
    with torch.no_grad():
        forward(model)
    assert len(tracer.records) == 2
