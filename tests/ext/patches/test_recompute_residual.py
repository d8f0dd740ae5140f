"""Proof of recompute-residual: a norm that hands its input through as the residual keeps it when it is recomputed.

Transformer Engine's fused norm, which does so on a GPU, is played by a norm of torch in Megatron's own layers: the
outputs, and that one of them is the argument itself, are all that recompute sees of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from routers import backward, config, forward

pytestmark = pytest.mark.usefixtures("world")

RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}


class _HandsThrough(torch.nn.Module):
    returns_residual = True  # later releases ask for it, this one looks for a tuple

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * x.square().mean(-1, keepdim=True).add(self.eps).rsqrt() * self.weight, x


def _model(kept: list[bool], **options: Any) -> Any:
    """Return a GPT of two layers with that norm before the MLP; `kept` gets whether each residual had its memory."""

    def add_residual(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        stock = get_bias_dropout_add(training, fused)

        def add(with_bias: Any, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            kept.append(residual.untyped_storage().nbytes() > 0)
            # Reading released memory would take the process down, so a wrong sum stands for it.
            return stock(with_bias, residual if kept[-1] else torch.zeros(residual.shape), dropout)

        return add

    built = config(num_layers=2, normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0, **options)
    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False, normalization="RMSNorm")
    spec.submodules.pre_mlp_layernorm = _HandsThrough
    spec.submodules.mlp_bda = add_residual
    return GPTModel(built, spec, vocab_size=64, max_sequence_length=32).cuda()


def test_layers_keep_their_residuals_and_all_gradients_are_right() -> None:
    kept: list[bool] = []
    model, plain = _model(kept, **RECOMPUTED), _model([])
    plain.load_state_dict(model.state_dict())
    loss, expected = forward(model), forward(plain)
    assert kept == [True, True], "a residual's memory was released"
    torch.testing.assert_close(loss, expected)
    backward(loss.mean())
    backward(expected.mean())
    gradients = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, msg=name)
