"""Proof of te-native-products: Transformer Engine's native grouped product gets the counts as a tensor.

Transformer Engine needs a GPU: stand-ins for its two linear layers say what they are called with. That the product is
right is tests/gpu's business.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP

from megatron_ext.experts import native


class Linear(torch.nn.Module):
    """Stands for a GroupedLinear: keeps the counts and passes its input on."""

    def __init__(self, *, grouped: bool) -> None:
        super().__init__()
        self.use_grouped_tensor = grouped
        self.seen: Any = None

    def forward(self, rows: torch.Tensor, counts: Any) -> tuple[torch.Tensor, None]:
        self.seen = counts
        return rows, None


def _experts(*, on_device: bool) -> TEGroupedMLP:
    config = SimpleNamespace(
        moe_apply_probs_on_input=False, fp8=None, fp4=None, use_te_activation_func=False, gated_linear_unit=False,
        moe_mlp_glu_interleave_size=None, bias_activation_fusion=False, use_fused_weighted_squared_relu=False,
        activation_func=torch.relu, delay_offload_until_cuda_graph=False, moe_router_padding_for_quantization=False,
        moe_token_dispatcher_type="alltoall", moe_flex_dispatcher_backend=None, add_bias_linear=False,
        fine_grained_activation_offloading=False, cpu_offloading=False, params_dtype=torch.bfloat16,
    )  # fmt: skip
    experts = TEGroupedMLP.__new__(TEGroupedMLP)
    torch.nn.Module.__init__(experts)
    experts.__dict__ |= {
        "config": config, "_with_fused_impl": False, "offload_expert_fc1": False, "offload_moe_act": False,
        "activation_recompute": False, "activation_func": torch.relu, "counts_on_device": on_device,
    }  # fmt: skip
    experts.linear_fc1, experts.linear_fc2 = Linear(grouped=True), Linear(grouped=True)
    return experts


@pytest.mark.parametrize("on_device", [True, False])
def test_the_counts_reach_the_linear_layers_as_a_tensor(on_device: bool) -> None:
    experts = _experts(on_device=on_device)
    counts = torch.tensor([3, 0, 5])
    output, bias = experts(torch.randn(8, 4), counts, torch.rand(8))
    assert output.shape == (8, 4)
    assert bias is None
    for linear in (experts.linear_fc1, experts.linear_fc2):
        assert isinstance(linear.seen, torch.Tensor if on_device else list)
        assert list(linear.seen) == [3, 0, 5]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"fp8": "e4m3"}, False),
        ({"add_bias_linear": True}, False),
        ({"params_dtype": torch.float32}, False),
    ],
)
def test_when_the_counts_may_stay(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], expected: bool) -> None:
    # Transformer Engine's own question, answered for bf16 on a Hopper GPU with a new cuBLASLt.
    module = ModuleType("grouped_linear")
    module.is_module_grouped_tensor_path_supported = lambda recipe, dtype: dtype == torch.bfloat16  # type: ignore[attr-defined]
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    holder = ModuleType("transformer_engine.pytorch.module")
    holder.grouped_linear = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module", holder)
    experts = _experts(on_device=False)
    for name, value in change.items():
        setattr(experts.config, name, value)
    assert native.takes_counts_on_device(experts) is expected
    experts.linear_fc2.use_grouped_tensor = False
    assert not native.takes_counts_on_device(experts)
