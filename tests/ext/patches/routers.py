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
