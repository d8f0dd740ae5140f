"""Proof of upcycle-dataset-size: the training set is long enough for a run that starts behind a dense one."""

from __future__ import annotations

from types import SimpleNamespace

import megatron.training.training as training
import pytest


@pytest.mark.parametrize(
    ("iteration", "consumed", "expected"),
    [
        (0, 0, 80),  # from scratch
        (5, 40, 80),  # resumed: as long as at its start
        (0, 48, 128),  # just upcycled from a dense run of six steps
        (5, 88, 128),  # that run, resumed
        (5, 30, 80),  # batch-size ramp-up: fewer samples than steps * global batch
    ],
)
def test_dataset_covers_the_samples_of_the_dense_run(
    iteration: int, consumed: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(
        train_samples=None,
        train_iters=10,
        global_batch_size=8,
        iteration=iteration,
        consumed_train_samples=consumed,
        consumed_valid_samples=0,
        full_validation=True,
        eval_iters=0,
        eval_interval=None,
        phase_transition_iterations=None,
    )
    monkeypatch.setattr(training, "get_args", lambda: args)
    assert training.get_train_valid_test_num_samples()[0] == expected


@pytest.mark.parametrize(
    ("iteration", "consumed", "expected"),
    [
        (0, 0, 3 * 4 * 8),  # from scratch: evaluated at 5, 10 and the end, 4 batches each
        (5, 32, 3 * 4 * 8),  # resumed
        (0, 64, 64 + 3 * 4 * 8),  # just upcycled from a dense run that evaluated twice
    ],
)
def test_held_out_set_covers_what_the_dense_run_read(
    iteration: int, consumed: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(
        train_samples=None,
        train_iters=10,
        global_batch_size=8,
        iteration=iteration,
        consumed_train_samples=0,
        consumed_valid_samples=consumed,
        full_validation=False,
        skip_train=False,
        eval_iters=4,
        eval_interval=5,
        start_eval_at_iter=None,
        phase_transition_iterations=None,
    )
    monkeypatch.setattr(training, "get_args", lambda: args)
    assert training.get_train_valid_test_num_samples()[1] == expected
