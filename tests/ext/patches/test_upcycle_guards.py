"""Proof of upcycle-guards: what would be upcycled wrongly is refused before the dense model is built."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.training.training as training
import pytest

from megatron_ext.errors import UserError


class _DenseModelBuilt(Exception):
    pass


def setup(monkeypatch: pytest.MonkeyPatch, load: Path, **more: Any) -> None:
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
        if len(calls) > 1:
            raise _DenseModelBuilt
        return []

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
def test_latent_experts_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="moe-latent-size"):
        setup(monkeypatch, tmp_path, moe_latent_size=16)
