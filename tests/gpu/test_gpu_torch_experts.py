"""Experts over torch's grouped product on a GPU: bf16 against fp64 and against Megatron's own, forward and backward.

Uneven and empty experts included; memory is made dirty first, so that what a kernel leaves unwritten shows.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

HIDDEN, FFN, EXPERTS = 256, 192, 8
UNEVEN = [17, 0, 1, 640, 3, 0, 255, 9]
EVEN = [128] * 8
LAST_ONLY = [0, 0, 0, 0, 0, 0, 0, 333]
NONE = [0] * 8


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    from megatron.core import parallel_state, tensor_parallel

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.distributed.init_process_group(
        backend="nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)

    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def _build(kind: Any, experts: int = EXPERTS, hidden: int = HIDDEN, ffn: int = FFN, **options: Any) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = {
        "num_layers": 1, "hidden_size": hidden, "ffn_hidden_size": 4 * ffn, "moe_ffn_hidden_size": ffn,
        "num_attention_heads": 1, "num_moe_experts": experts, "add_bias_linear": False, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "bias_activation_fusion": True, "bf16": True,
        "params_dtype": torch.bfloat16, "gradient_accumulation_fusion": False,
    }  # fmt: skip
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return kind(
        experts, TransformerConfig(**{**settings, **options}), linears, pg_collection=get_default_pg_collection()
    ).cuda()


def _pair(**options: Any) -> tuple[Any, Any]:
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_ext.experts.module import TorchGroupedMLP

    theirs, ours = _build(SequentialMLP, **options), _build(TorchGroupedMLP, **options)
    ours.load_state_dict(theirs.state_dict())
    assert not ours.unsupported
    return theirs, ours


def _inputs(counts: list[int], hidden: int = HIDDEN) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(sum(counts))
    rows = torch.randn(sum(counts), hidden, device="cuda").bfloat16()
    return rows, torch.rand(sum(counts), device="cuda"), torch.randn_like(rows)


def _soil() -> None:
    # What the caching allocator hands out next is full of NaN.
    for size in (1 << 12, 1 << 18, 1 << 22, 1 << 24):
        kept = [torch.full((size,), float("nan"), device="cuda") for _ in range(4)]
        del kept


def _run(experts: Any, counts: list[int], on: str = "cuda") -> dict[str, torch.Tensor]:
    rows, probs, back = _inputs(counts)
    rows.requires_grad_()
    probs.requires_grad_()
    experts.zero_grad()
    _soil()
    output, _ = experts(rows, torch.tensor(counts, device=on), probs)
    output.backward(back)
    assert rows.grad is not None
    assert probs.grad is not None
    weights = {name: parameter.grad.clone() for name, parameter in experts.named_parameters()}
    return {"output": output.detach(), "rows": rows.grad, "probs": probs.grad, **weights}


def _exact(experts: Any, counts: list[int]) -> dict[str, torch.Tensor]:
    """Return the same in fp64, written out."""
    rows, probs, back = (value.double() for value in _inputs(counts))
    rows.requires_grad_()
    probs.requires_grad_()
    weights = {name: parameter.detach().double().requires_grad_() for name, parameter in experts.named_parameters()}
    outputs = []
    for at, (part, weight) in enumerate(zip(rows.split(counts), probs.split(counts), strict=True)):
        gate, up = (part @ weights[f"local_experts.{at}.linear_fc1.weight"].t()).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up * weight[:, None]
        outputs.append(inner @ weights[f"local_experts.{at}.linear_fc2.weight"].t())
    output = torch.cat(outputs)
    output.backward(back)
    assert rows.grad is not None
    assert probs.grad is not None
    grads = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    return {"output": output.detach(), "rows": rows.grad, "probs": probs.grad, **grads}


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    size = exact.double().norm()
    return float((found.double() - exact.double()).norm() / size) if size else float(found.double().norm())


@pytest.mark.parametrize("on", ["cuda", "cpu"])
@pytest.mark.parametrize("counts", [UNEVEN, EVEN, LAST_ONLY, NONE], ids=["uneven", "even", "last only", "none"])
def test_bf16_is_as_close_to_fp64_as_megatrons_experts(counts: list[int], on: str) -> None:
    theirs, ours = _pair()
    mine, reference, exact = _run(ours, counts, on), _run(theirs, counts, on), _exact(theirs, counts)
    assert mine.keys() == reference.keys() == exact.keys()
    for name, value in exact.items():
        assert torch.isfinite(mine[name]).all(), name
        # Two bf16 roundings on the way: 2^-8 each.
        assert _error(mine[name], value) < max(1.2 * _error(reference[name], value), 1e-3), name


def test_experts_without_rows_get_zero_gradients() -> None:
    _, ours = _pair()
    grads = _run(ours, UNEVEN)
    for at, count in enumerate(UNEVEN):
        for part in ("linear_fc1", "linear_fc2"):
            assert bool(grads[f"local_experts.{at}.{part}.weight"].any()) == (count > 0), (at, part)


def test_nothing_waits_for_the_gpu() -> None:
    _, ours = _pair()
    counts = torch.tensor(UNEVEN, device="cuda")
    rows, probs, back = _inputs(UNEVEN)
    rows.requires_grad_()
    ours(rows, counts, probs)[0].backward(back)  # kernels load and compile
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(rows, counts, probs)[0].backward(back)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gradients_are_summed_in_megatrons_buffer() -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megatron_ext.experts.grouped import as_one

    _, ours = _pair(gradient_accumulation_fusion=True)
    options = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    layout = DistributedOptimizer.compute_full_param_layout(list(ours.parameters()), None, 1, options)
    model = DistributedDataParallel(ours.config, options, ours, full_param_layout=layout)
    assert as_one([expert.linear_fc1.weight for expert in ours.local_experts]) is not None
    model.zero_grad_buffer()
    rows, probs, back = _inputs(UNEVEN)
    for _ in range(2):
        model(rows.clone().requires_grad_(), torch.tensor(UNEVEN, device="cuda"), probs)[0].backward(back)
    exact = _exact(ours, UNEVEN)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is None
        assert _error(parameter.main_grad, 2 * exact[name]) < 1e-2, name
