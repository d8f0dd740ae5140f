"""Tiny MoE models, their optimizer and one training step, the way Megatron's training loop puts them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import process_groups
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import custom_backward
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

EXPERTS, TOKENS, VOCABULARY = 8, 16, 64


def groups(expert_parallel: int) -> None:
    """Make Megatron's process groups anew, all ranks data parallel, and seed its random states."""
    process_groups.destroy_all()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=expert_parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(17, force_reset_rng=True)
    torch.manual_seed(17)


def config(expert_parallel: int, **options: Any) -> TransformerConfig:
    """Return a configuration of 2 layers, hidden 16, 8 experts, top-2, bf16 unless the options say otherwise."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": expert_parallel,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
    }
    return TransformerConfig(**{**settings, **options})


@dataclass
class Training:
    """A wrapped model and its optimizer."""

    model: Any
    optimizer: Any
    config: TransformerConfig

    def step(self, seed: int) -> float:
        """Train on one sequence a rank; return this rank's mean loss."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = losses(self.model, seed).float().mean()
        custom_backward(loss, None)
        finalize_model_grads([self.model])
        succeeded, _, _ = self.optimizer.step()
        assert succeeded
        return loss.item()


def gpt(settings: TransformerConfig) -> GPTModel:
    """Return the bare model on the device."""
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    return GPTModel(
        settings,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        share_embeddings_and_output_weights=False,
    ).cuda()


def training(settings: TransformerConfig, *, bucket_size: int | None = None, lr: float = 1e-2) -> Training:
    """Return a model under DDP with the distributed optimizer, gradients reduced in buckets where a size is given."""
    buckets = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=bucket_size is not None,
        bucket_size=bucket_size,
        grad_reduce_in_fp32=True,
    )
    module = gpt(settings)
    model = DistributedDataParallel(settings, buckets, Float16Module(settings, module) if settings.bf16 else module)
    options = OptimizerConfig(
        optimizer="adam", lr=lr, weight_decay=0.1, clip_grad=1.0, use_distributed_optimizer=True,
        bf16=settings.bf16, params_dtype=settings.params_dtype,
    )  # fmt: skip
    settings.finalize_model_grads_func = finalize_model_grads
    return Training(model, get_megatron_optimizer(options, [model]), settings)


def losses(model: Any, seed: int, tokens: int = TOKENS) -> torch.Tensor:
    """Run this rank's sequence of a step; return the loss of each token, [1, tokens]."""
    generator = torch.Generator().manual_seed(1000 * seed + torch.distributed.get_rank())
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=generator).cuda()
    positions = torch.arange(tokens, device="cuda")[None]
    mask = torch.ones(1, 1, tokens, tokens, device="cuda").triu(1).bool()
    return model(ids, positions, mask, labels=ids)
