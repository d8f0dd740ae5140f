"""Proof of upcycle-guards: what would be upcycled wrongly is refused before the dense model is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.training.training as training
import pytest

from megatron_ext.errors import UserError


class _DenseModelBuilt(Exception):
    pass


def _stop(_: Any) -> list[Any]:
    raise _DenseModelBuilt


def setup(
    monkeypatch: pytest.MonkeyPatch, load: Path, dense_model: Callable[[Any], list[Any]] = _stop, **more: Any
) -> None:
    """Run Megatron's set-up with the flag, up to the dense model."""
    args = SimpleNamespace(
        **dict.fromkeys(("perform_rl_step", "no_load_optim", "logits_save_dir", "logits_load_dir", "moe_latent_size",
                         "moe_router_num_groups", "moe_shared_expert_intermediate_size")),
        num_experts=4, ffn_hidden_size=64, moe_ffn_hidden_size=64, expert_model_parallel_size=1,
        moe_upcycling_granularity=1, moe_use_upcycling=True, skip_train=True, save="none", load=str(load),
        gtp_weight_remat_size=1, expert_gtp_weight_remat_size=1, ckpt_format="torch_dist",
        moe_router_load_balancing_type="aux_loss", moe_layer_freq=[0, 1],
    )  # fmt: skip
    vars(args).update(more)
    calls: list[Any] = []

    def model(*_: Any, **__: Any) -> list[Any]:
        calls.append(args)
        return dense_model(args) if len(calls) > 1 else []

    monkeypatch.setattr(training, "get_args", lambda: args)
    monkeypatch.setattr(training, "get_timers", lambda: None)
    monkeypatch.setattr(training, "get_one_logger", lambda: None)
    monkeypatch.setattr(training, "get_model", model)
    monkeypatch.setattr(training, "checkpoint_exists", lambda path: False)
    training.setup_model_and_optimizer(None, model_provider_func=lambda: None)


@pytest.mark.usefixtures("world")
def test_a_missing_checkpoint_is_no_random_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint here"):
        setup(monkeypatch, tmp_path)


@pytest.mark.usefixtures("world")
def test_the_dense_model_has_none_of_the_moes_arguments_and_the_moe_gets_them_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Converting(Exception):
        pass

    def convert(*_: Any, **__: Any) -> None:
        seen.append(training.get_args().moe_layer_freq)
        raise Converting

    seen: list[Any] = []
    monkeypatch.setattr("megatron_ext.upcycle.in_training.check", lambda args: None)  # there is no checkpoint to check
    monkeypatch.setattr(training.upcycling_utils, "load_and_upcycle_model", convert)
    with pytest.raises(Converting):
        setup(monkeypatch, tmp_path, dense_model=lambda args: seen.append(args.moe_layer_freq) or [])
    assert seen == [1, [0, 1]]


@pytest.mark.usefixtures("world")
def test_latent_experts_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="moe-latent-size"):
        setup(monkeypatch, tmp_path, moe_latent_size=16)
