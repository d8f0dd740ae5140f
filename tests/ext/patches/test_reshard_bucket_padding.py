"""Proof of reshard-bucket-padding: each parameter is saved with its own optimizer state, whatever the buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(autouse=True)
def _cuda_type_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the proof run without device-neutral-type: the release asks parameters for the name of a CUDA type."""
    stock = torch.Tensor.type

    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(tensor, *args, **kwargs) if args or kwargs else "torch.cuda.FloatTensor"

    monkeypatch.setattr(torch.Tensor, "type", named)


def _trained(bucket_size: int | None) -> tuple[Any, Any]:
    """Return a model of six odd-sized layers after one step, its gradients reduced in buckets of that many elements."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(*(torch.nn.Linear(5 + n, 6 + n) for n in range(6))).cuda()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    buckets = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=bucket_size is not None, bucket_size=bucket_size
    )
    model = DistributedDataParallel(config, buckets, net)
    options = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True, clip_grad=0.0)
    optimizer = get_megatron_optimizer(options, [model]).chained_optimizers[0]
    model.zero_grad_buffer()
    model(torch.randn(3, 5, device="cuda")).square().sum().backward()
    model.finish_grad_sync()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("bucket_size", [None, 100, 1], ids=["one bucket", "few", "many"])
def test_every_parameter_keeps_its_state(bucket_size: int | None) -> None:
    model, optimizer = _trained(bucket_size)
    weights = {
        name: ShardedTensor.from_rank_offsets(name, parameter) for name, parameter in model.module.named_parameters()
    }
    saved = optimizer.sharded_param_state_fully_reshardable(weights, is_loading=False, metadata={})
    # On one rank a parameter's shard is the whole parameter.
    own = {name: optimizer._get_main_param_and_optimizer_states(p) for name, p in model.module.named_parameters()}
    compared = 0
    for entry in saved.values():
        for key in ("param", "exp_avg", "exp_avg_sq"):
            name = entry[key].key.removeprefix(f"optimizer.state.{key}.")
            torch.testing.assert_close(entry[key].data.flatten(), own[name][key].flatten(), rtol=0, atol=0, msg=name)
            compared += 1
    assert compared == 3 * 12
    assert (len(optimizer.buffers[0].buckets) > 1) == (bucket_size is not None)
