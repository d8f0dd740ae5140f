"""A layer's experts, ours and Megatron's, with the same weights and the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.experts.module import TorchGroupedMLP

HIDDEN, FFN = 16, 24


def config(experts: int, **options: Any) -> TransformerConfig:
    """Return a configuration of SwiGLU experts: hidden 16, intermediate 24."""
    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 4 * FFN,
        "moe_ffn_hidden_size": FFN,
        "num_attention_heads": 1,
        "num_moe_experts": experts,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": not torch.cuda.is_initialized(),
    }
    return TransformerConfig(**{**settings, **options})


def build(kind: type[SequentialMLP], experts: int, **options: Any) -> Any:
    """Return the experts on the device."""
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return kind(experts, config(experts, **options), linears, pg_collection=get_default_pg_collection()).cuda()


def pair(experts: int, **options: Any) -> tuple[Any, TorchGroupedMLP]:
    """Return Megatron's experts and ours with the same weights."""
    theirs, ours = build(SequentialMLP, experts, **options), build(TorchGroupedMLP, experts, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@dataclass
class Pass:
    """What a forward and backward pass gives."""

    output: Tensor
    rows: Tensor
    probs: Tensor
    weights: dict[str, Tensor | None]


def run(experts: Any, counts: list[int], *, seed: int = 1) -> Pass:
    """Run rows through the experts and back, from a gradient that differs in every element."""
    generator = torch.Generator().manual_seed(seed)
    total, dtype = sum(counts), experts.local_experts[0].linear_fc1.weight.dtype
    size = experts.config.hidden_size
    rows = torch.randn(total, size, generator=generator).to(dtype).cuda().requires_grad_()
    probs = torch.rand(total, generator=generator).cuda().requires_grad_()
    back = torch.randn(total, size, generator=generator).to(dtype).cuda()
    experts.zero_grad()
    output, bias = experts(rows, torch.tensor(counts, device="cuda"), probs)
    assert bias is None
    torch.autograd.backward(output, back)
    assert rows.grad is not None
    assert probs.grad is not None
    weights = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return Pass(output.detach(), rows.grad, probs.grad, weights)
