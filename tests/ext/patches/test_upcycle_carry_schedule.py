"""Proof of upcycle-carry-schedule: a checkpoint without optimizer state resumes its learning-rate schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import megatron.training.checkpointing as checkpointing
import pytest


class Kept:
    """Stands for the model or the schedule: records what is loaded into it."""

    is_stub_optimizer = False
    param_groups: tuple = ()

    def __init__(self) -> None:
        self.loaded: Any = None

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        self.loaded = state

    def reload_model_params(self) -> None:
        self.loaded = "from the model"


@pytest.mark.usefixtures("world")
def test_the_schedule_goes_on_with_a_fresh_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "world_size": 1}
    saved = SimpleNamespace(**common, no_save_optim=True, no_save_rng=True, consumed_train_samples=48)
    state = {"args": saved, "iteration": 12, "checkpoint_version": 3.0, "model": {},
             "opt_param_scheduler": {"num_steps": 48}}  # fmt: skip
    args = SimpleNamespace(
        **common, load="x", ckpt_format="torch_dist", auto_detect_ckpt_format=False, finetune=False, bf16=True,
        fp16=False, no_load_optim=False, no_load_rng=False, use_distributed_optimizer=False, data_parallel_size=1,
        load_main_params_from_ckpt=False, num_experts=None,
    )  # fmt: skip
    kind = checkpointing.CheckpointType.GLOBAL
    monkeypatch.setattr(checkpointing, "get_args", lambda: args)
    monkeypatch.setattr(checkpointing, "_load_base_checkpoint", lambda *_, **__: (dict(state), "x", False, kind))
    monkeypatch.setattr(checkpointing, "generate_state_dict", lambda *_, **__: {})
    for name in ("check_checkpoint_args", "update_num_microbatches", "fix_query_key_value_ordering"):
        monkeypatch.setattr(checkpointing, name, lambda *_, **__: None)
    monkeypatch.setattr(checkpointing, "_maybe_setup_gpt_to_hybrid_load", lambda *_: (None, False))
    monkeypatch.setattr(checkpointing.dist_checkpointing, "load_content_metadata", lambda **_: {})
    monkeypatch.setattr(checkpointing.wandb_utils, "on_load_checkpoint_success", lambda *_: None)
    model, optimizer, schedule = Kept(), Kept(), Kept()
    assert checkpointing.load_checkpoint([model], optimizer, schedule) == (12, 0)
    assert optimizer.loaded == "from the model"
    assert schedule.loaded == {"num_steps": 48}
