"""Proof: a run needs no evaluation interval."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import megatron.training.training as training
import pytest

ARGS: dict[str, Any] = {
    "train_samples": None,
    "train_iters": 10,
    "global_batch_size": 8,
    "iteration": 0,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "full_validation": False,
    "skip_train": False,
    "eval_iters": 4,
    "eval_interval": None,
    "start_eval_at_iter": None,
    "phase_transition_iterations": None,
    "perform_rl_step": False,
}


@pytest.mark.parametrize("start", [None, 5])
def test_held_out_set_is_for_the_evaluation_after_training(monkeypatch: pytest.MonkeyPatch, start: int | None) -> None:
    monkeypatch.setattr(training, "get_args", lambda: SimpleNamespace(**ARGS | {"start_eval_at_iter": start}))
    assert training.get_train_valid_test_num_samples()[1] == 1 * 4 * 8


def test_resumed_run_has_evaluated_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(**ARGS | {"iteration": 5, "consumed_train_samples": 40})
    monkeypatch.setattr(training, "get_args", lambda: args)

    class Reached(Exception):
        pass

    def build(_: Any) -> None:
        raise Reached

    build.is_distributed = True  # type: ignore[attr-defined]  # each rank builds, so no rank is asked for
    monkeypatch.setattr(training, "build_train_valid_test_datasets", build)
    with pytest.raises(Reached):
        training.build_train_valid_test_data_loaders(build)
    assert args.consumed_valid_samples == 0
