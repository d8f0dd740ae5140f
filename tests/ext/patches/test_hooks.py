"""Proof of the call sites: patched Megatron calls megatron_ext where its instruments need it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import megatron.training.global_vars as global_vars
import pytest
from source import calls, function

from megatron_ext.runtime import hooks

TRAINING = "megatron.training.training"


def test_training_calls_the_hooks() -> None:
    assert calls(function(TRAINING, "setup_model_and_optimizer")).count("hooks.model_built") == 1
    assert calls(function(TRAINING, "train")).count("hooks.step_end") == 1
    saving = calls(function(TRAINING, "save_checkpoint_and_time"))
    assert saving.count("hooks.checkpoint_begins") == 1
    assert saving.index("hooks.checkpoint_begins") < saving.index("save_checkpoint")


def test_every_scalar_reaches_the_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    tee = object()

    def wrap(writer: Any, args: Any) -> Any:
        seen.append((writer, args))
        return tee

    monkeypatch.setattr(hooks, "wrap_summary_writer", wrap)
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", None)
    args = SimpleNamespace(tensorboard_dir=None, rank=0, world_size=1)
    global_vars._set_tensorboard_writer(args)
    assert seen == [(None, args)]
    assert global_vars.get_tensorboard_writer() is tee
