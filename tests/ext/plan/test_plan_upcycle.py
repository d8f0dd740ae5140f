"""The calculator of upcycling against published figures, and against a real model's weights."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError

import pytest

from megatron_ext.cli import main
from megatron_ext.errors import UserError
from megatron_ext.plan import parameters
from megatron_ext.plan.parameters import ModelShape
from megatron_ext.plan.upcycle import cost
from megatron_ext.plan.upcycle_cli import tokens

# The training handbook's first dense model and its MoE (sections 2.4 and 2.5).
DENSE = ModelShape(16, 2048, 8192, 32, 128256, query_groups=4)
MOE = ModelShape(16, 2048, 8192, 32, 128256, query_groups=4, num_experts=64, moe_ffn=1024, topk=8, moe_layers=16)


def test_counts_are_the_handbooks() -> None:
    assert round(parameters.total(DENSE) / 1e9, 3) == 1.219
    assert round(parameters.active(MOE) / 1e9, 3) == 1.221
    assert round(parameters.total(MOE) / 1e9, 2) == 6.86
    assert MOE.dense() == DENSE
    assert parameters.checkpoint_bytes(MOE) == 2 * parameters.total(MOE)


@pytest.mark.parametrize(("name", "more"), [
    ("plain", {}), ("mixed", {"moe_layers": 2, "shared_ffn": 24}), ("untied", {"tied": False, "num_experts": 0}),
    ("biases", {"gated": False, "biases": True, "norm_biases": True}),
])  # fmt: skip
@pytest.mark.usefixtures("world")
def test_counts_are_those_of_real_megatron(name: str, more: dict) -> None:
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    base = {"num_experts": 4, "moe_ffn": 16, "topk": 2, "moe_layers": 4}
    shape = ModelShape(4, 32, 48, 4, 64, query_groups=2, **{**base, **more})
    moe = {"num_moe_experts": shape.num_experts, "moe_router_topk": shape.topk, "moe_ffn_hidden_size": shape.moe_ffn,
           "moe_layer_freq": [1] * shape.moe_layers + [0] * (4 - shape.moe_layers),
           "moe_shared_expert_intermediate_size": shape.shared_ffn or None}  # fmt: skip
    config = TransformerConfig(
        num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2,
        normalization="LayerNorm" if shape.norm_biases else "RMSNorm", gated_linear_unit=shape.gated,
        activation_func=torch.nn.functional.silu if shape.gated else torch.nn.functional.gelu,
        add_bias_linear=shape.biases, bias_activation_fusion=False, use_cpu_initialization=True,
        **(moe if shape.num_experts else {}),
    )  # fmt: skip
    model = GPTModel(config, get_gpt_decoder_block_spec(config, use_transformer_engine=False), vocab_size=64,
                     max_sequence_length=16, position_embedding_type="rope",
                     share_embeddings_and_output_weights=shape.tied)
    assert sum(weight.numel() for weight in model.parameters()) == parameters.total(shape), name


def test_the_two_published_cases() -> None:
    # OLMoE: caught up after 500B of 2T; equal active size.
    olmoe = cost(dense_tokens=2e12, moe_tokens=610e9, dense_active=1.2e9, moe_active=1.2e9)
    assert olmoe.olmoe_tokens == 500e9
    assert olmoe.sparse_tokens == 2.4e12
    assert olmoe.verdict == "open"
    assert olmoe.dense_flops == 6 * 1.2e9 * 2e12
    # A wider MoE uses more compute a token, so the same compute is fewer tokens.
    wider = cost(dense_tokens=1e12, moe_tokens=1e11, dense_active=1e9, moe_active=2e9)
    assert wider.sparse_tokens == 0.6e12
    assert wider.verdict == "upcycle"
    assert wider.scratch_tokens == 1e11 + 5e11
    assert wider.pays_with_dense == "scratch"
    assert cost(dense_tokens=1e12, moe_tokens=2e12, dense_active=1, moe_active=1).verdict == "scratch"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "upcycle", "--dense-tokens", "2T", "--tokens", "100B"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weights"]["moe"] == parameters.total(MOE)
    assert found["checkpoint_bytes"] == 2 * parameters.total(MOE)
    assert found["verdict"] == "upcycle"
    assert found["olmoe_tokens"] == 5e11
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "13.72 GB" in said
    assert "500B tokens as in OLMoE" in said
    assert "2409.02060" in said


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "upcycle", "--tokens", "1B"]) == 64
    assert "--dense-tokens" in capsys.readouterr().err
    assert main(["plan", "upcycle", "--tokens", "many"]) == 64
    assert main(["plan", "upcycle", "--dense-tokens", "1B", "--tokens", "1B", "--router-topk", "100"]) == 64
    assert "cannot choose" in capsys.readouterr().err
    with pytest.raises(UserError, match="heads do not divide"):
        parameters.total(ModelShape(2, 30, 64, 4, 100))
    for text in ("-1B", "0", "nan", "inf", ""):
        with pytest.raises(ArgumentTypeError):
            tokens(text)
