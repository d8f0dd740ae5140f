"""Proof of distopt-torch-adam-resume: a resumed run takes the very steps that the uninterrupted one takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import distrib_optimizer as module
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(module.HAVE_APEX_OR_TE, reason="the fault is in the path of torch's own Adam"),
]


def _model_and_optimizer() -> tuple[Any, Any]:
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).cuda()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), net)
    options = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True, clip_grad=0.0)
    optimizer = get_megatron_optimizer(options, [model])
    return model, optimizer.chained_optimizers[0]


def _step(model: Any, optimizer: Any, value: float) -> None:
    model.zero_grad_buffer()
    model(torch.full((2, 4), value, device="cuda")).square().sum().backward()
    model.finish_grad_sync()
    optimizer.step()


def test_state_dict_before_the_first_step() -> None:
    _, optimizer = _model_and_optimizer()
    optimizer.state_dict()


def test_resumed_optimizer_takes_the_same_steps() -> None:
    model, optimizer = _model_and_optimizer()
    for value in (1.0, 2.0):
        _step(model, optimizer, value)
    groups = optimizer.state_dict()
    # What a checkpoint carries of the parameters: the step travels with the groups, here it is a placeholder.
    saved = optimizer.get_parameter_state_dp_reshardable()
    for bucket in (b for by_dtype in _buffers(saved) for buckets in by_dtype.values() for b in buckets):
        for tensors in bucket:
            tensors.update(padding=False, step=torch.tensor(0.0))
            tensors.update({k: v.detach().clone() for k, v in tensors.items() if isinstance(v, torch.Tensor)})
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    resumed_model, resumed = _model_and_optimizer()
    resumed.load_state_dict(resumed.state_dict())  # how loading allocates the state
    resumed_model.load_state_dict(weights)
    resumed.load_state_dict(groups)
    resumed.load_parameter_state_from_dp_reshardable(saved)
    for value in (3.0, 4.0, 5.0):
        _step(model, optimizer, value)
        _step(resumed_model, resumed, value)
    for name, expected in model.state_dict().items():
        assert torch.equal(resumed_model.state_dict()[name], expected), name


def _buffers(saved: dict[Any, Any]) -> list[Any]:
    return [value for key, value in saved.items() if isinstance(key, int)]
