"""Small real routers and MoE layers for the proofs."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

SMALL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
    "add_bias_linear": False,
    "gradient_accumulation_fusion": False,
    "use_cpu_initialization": not torch.cuda.is_initialized(),
}
EXPERT_BIAS: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def config(**options: Any) -> TransformerConfig:
    """Return a one-layer configuration of 8 experts, top-2, hidden 16, with the options on top."""
    return TransformerConfig(**{**SMALL, **options})


def router(**options: Any) -> TopKRouter:
    """Return a router in training mode; its parameters are on the device."""
    built = TopKRouter(config(**options), get_default_pg_collection())
    built.set_layer_number(1)
    return built.cuda()


def gpt(**options: Any) -> Any:
    """Return a GPT model of the local spec, MoE in every layer, without dropout; vocabulary 64, sequences up to 32."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    built = config(hidden_dropout=0.0, attention_dropout=0.0, **options)
    spec = get_gpt_layer_local_spec(num_experts=built.num_moe_experts, moe_grouped_gemm=False)
    return GPTModel(built, spec, vocab_size=64, max_sequence_length=32).cuda()


def forward(model: Any, tokens: int = 32, seed: int = 1) -> torch.Tensor:
    """Run one sequence through a model; return the loss of each token, [1, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (1, tokens), generator=generator).cuda()
    positions = torch.arange(tokens, device="cuda")[None]
    mask = torch.ones(1, 1, tokens, tokens, device="cuda").triu(1).bool()
    return model(ids, positions, mask, labels=ids)


def backward(loss: torch.Tensor) -> None:
    """Run the backward pass as Megatron's schedules do: by the engine, so that recomputation sees the CPU runtime."""
    from megatron.core.pipeline_parallel.schedules import custom_backward

    custom_backward(loss, None)
