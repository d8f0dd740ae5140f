"""Proof of grad-views, norm-members, plain-local: what the optimizer asks about a thousand parameters, it asks once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import to_local_if_dtensor

from megatron_ext.runtime import kept_grads

pytestmark = pytest.mark.usefixtures("world")
SHAPES = {"one": (7, 5), "vector": (9,), "expert": (4, 6), "tied": (3, 3)}


class Net(torch.nn.Module):
    """Weights without a forward pass: the gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(5)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=made).bfloat16()
            self.register_parameter(name, torch.nn.Parameter(value))
        self.expert.allreduce = False  # Megatron's marks of an expert's weights, and of weights counted elsewhere
        self.tied.shared = True


class Training:
    """Megatron's distributed optimizer over these weights."""

    def __init__(self, *, fp32_grads: bool = True, own_norm: str = "") -> None:
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=fp32_grads)
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=2)
        net = Net()
        for name, parameter in net.named_parameters():
            if name == own_norm:
                parameter.grad_norm_group = "mtp"
        self.model = DistributedDataParallel(config, ddp, net)
        options = OptimizerConfig(
            optimizer="adam", lr=0.1, clip_grad=0.5, use_distributed_optimizer=True, bf16=True,
            params_dtype=torch.bfloat16,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(options, [self.model])

    def draw(self, seed: int, *, set_to_none: bool = True) -> None:
        """Give gradients drawn from the seed."""
        self.optimizer.zero_grad(set_to_none)
        made = torch.Generator().manual_seed(seed)
        for parameter in self.model.module.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=made))

    def step(self, seed: int, **options: bool) -> float:
        """Take a step with them; return the norm that was logged."""
        self.draw(seed, **options)
        succeeded, norm, _ = self.optimizer.step()
        assert succeeded
        return float(norm)

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the weights."""
        return {name: value.detach().clone() for name, value in self.model.module.named_parameters()}

    def forget(self) -> None:
        """Throw away what is kept, so that the next step asks anew, as upstream does at every step."""
        for part in self.optimizer.chained_optimizers:
            kept_grads.forget(part)


def right_norm(seed: int) -> float:
    """The norm over all gradients but those counted elsewhere, of what `Training.step` draws."""
    made = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
    return sum(value.double().square().sum().item() for name, value in drawn.items() if name != "tied") ** 0.5


def test_a_step_cuts_no_gradient_that_it_has_cut_before(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Training()
    cut: Counter[str] = Counter()
    for part in trained.optimizer.chained_optimizers:
        real = part._get_model_param_range_map

        def counted(parameter: Any, real: Any = real) -> Any:
            cut["gradients"] += 1
            return real(parameter)

        monkeypatch.setattr(part, "_get_model_param_range_map", counted)
    seen = []
    for seed in range(3):
        trained.draw(seed)
        cut.clear()
        trained.optimizer.prepare_grads()
        seen.append(cut["gradients"])
    assert seen == [len(SHAPES), 0, 0]


def test_who_counts_in_which_norm_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    who_counts_in_the_norm_is_asked_once(monkeypatch)
    which_norm_clips_a_parameter_is_asked_once(monkeypatch)


def who_counts_in_the_norm_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Training()
    asked: Counter[str] = Counter()
    real = megatron_optimizer.param_is_not_shared

    def counted(parameter: Any) -> bool:
        asked["parameters"] += 1
        return bool(real(parameter))

    monkeypatch.setattr(megatron_optimizer, "param_is_not_shared", counted)
    seen = []
    for seed in range(3):
        asked.clear()
        assert trained.step(seed) == pytest.approx(right_norm(seed), rel=1e-6)
        seen.append(asked["parameters"])
    assert seen == [len(SHAPES), 0, 0]


def test_a_plain_tensor_is_taken_in_no_mode_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: Counter[str] = Counter()
    real = torch.no_grad

    def counted() -> Any:
        entered["modes"] += 1
        return real()

    monkeypatch.setattr(torch, "no_grad", counted)
    tensor = torch.ones(3)
    assert to_local_if_dtensor(tensor) is tensor
    assert not entered


def which_norm_clips_a_parameter_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Training(own_norm="one")
    trained.step(0)
    asked: Counter[str] = Counter()
    real = megatron_optimizer._get_param_grad_norm_group

    def counted(parameter: Any) -> Any:
        asked["parameters"] += 1
        return real(parameter)

    monkeypatch.setattr(megatron_optimizer, "_get_param_grad_norm_group", counted)
    trained.step(1)
    assert not asked
    trained.forget()
    trained.step(2)
    assert asked


def assert_like_one_that_keeps_nothing(seeds: range, **options: Any) -> None:
    """Norms and weights of these steps, bit by bit."""
    keeps, forgets = Training(**options), Training(**options)
    for seed in seeds:
        forgets.forget()
        assert keeps.step(seed) == forgets.step(seed)
        assert keeps.optimizer.grad_norms_by_group == forgets.optimizer.grad_norms_by_group
        assert_equal(keeps, forgets)


def assert_equal(some: Training, others: Training) -> None:
    """The weights, bit by bit."""
    for name, value in some.weights().items():
        assert torch.equal(value, others.weights()[name]), name


@pytest.mark.parametrize("fp32_grads", [True, False], ids=["fp32 gradients", "bf16 gradients"])
def test_the_steps_are_those_of_an_optimizer_that_keeps_nothing(fp32_grads: bool) -> None:
    assert_like_one_that_keeps_nothing(range(4), fp32_grads=fp32_grads)


@pytest.mark.parametrize("name", ["one", "expert"])
def test_a_parameter_with_a_norm_of_its_own(name: str) -> None:
    assert_like_one_that_keeps_nothing(range(4), own_norm=name)


def test_a_gradient_that_moved_is_cut_anew() -> None:
    moved, stays = Training(), Training()
    for trained in (moved, stays):
        trained.step(0)
    for parameter in moved.model.module.parameters():
        parameter.main_grad = torch.empty_like(parameter.main_grad)
    for seed in range(1, 3):
        assert moved.step(seed) == stays.step(seed)
        assert_equal(moved, stays)


def test_a_gradient_whose_data_moved_is_cut_anew() -> None:
    moved, stays = Training(), Training()
    for seed in range(3):
        assert moved.step(seed) == stays.step(seed)
        assert_equal(moved, stays)
        for parameter in moved.model.module.parameters():
            parameter.main_grad.data = parameter.main_grad.clone()


@pytest.mark.parametrize("fp32_grads", [True, False], ids=["fp32 gradients", "bf16 gradients"])
def test_a_main_parameter_that_was_replaced_gets_the_gradient(fp32_grads: bool) -> None:
    replaced, stays = Training(fp32_grads=fp32_grads), Training(fp32_grads=fp32_grads)
    for seed in range(3):
        assert replaced.step(seed) == stays.step(seed)
        assert_equal(replaced, stays)
        for part in replaced.optimizer.chained_optimizers:
            replace_mains(part)


def replace_mains(part: Any) -> None:
    """Give the optimizer copies of its main parameters, with their state."""
    inner = part.optimizer
    copies = {main: main.detach().clone().requires_grad_() for main in part.get_parameters()}
    for groups in (part.shard_fp32_from_float16_groups, [group["params"] for group in inner.param_groups]):
        for group in groups:
            group[:] = [copies[main] for main in group]
    for main, copy in copies.items():
        inner.state[copy] = inner.state.pop(main)
        for name in ("allreduce", "shared"):
            if hasattr(main, name):
                setattr(copy, name, getattr(main, name))


def test_gradients_kept_between_steps_or_given_back_and_taken_anew() -> None:
    zeroed, stays = Training(), Training()
    for seed in range(4):
        assert zeroed.step(seed, set_to_none=False) == stays.step(seed)
        assert_equal(zeroed, stays)
        zeroed.model.offload_grad_buffers(synchronize=False, empty_cache=False)
        held = [torch.empty(1000) for _ in range(seed)]  # in the place of the memory that was given back
        zeroed.model.restore_grad_buffers(synchronize=False)
        assert len(held) == seed
