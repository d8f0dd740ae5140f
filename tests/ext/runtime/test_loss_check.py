"""`--moe-ext-loss-check`: an unusable loss stops the run, after its micro-batch or before the step's optimizer."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator

import pytest
import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import rerun_state_machine as rerun

from megatron_ext.runtime import batch

MICRO_BATCHES = 3


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    """Three micro-batches a step; Megatron's own rerun machine, told not to run again: it raises at once."""
    rerun.destroy_rerun_state_machine()  # of a test before, in the same process
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.DISABLED)
    calculator.init_num_microbatches_calculator(0, None, MICRO_BATCHES, 1, 1)
    yield
    calculator.destroy_num_microbatches_calculator()
    rerun.destroy_rerun_state_machine()


def _step(monkeypatch: pytest.MonkeyPatch, check: str, *losses: float) -> int:
    """Run the micro-batches of a step; return how many were accepted."""
    args = Namespace(check_for_nan_in_loss_and_grad=True, moe_ext_loss_check=check)
    monkeypatch.setattr(batch, "get_args", lambda: args)
    for number, loss in enumerate(losses):
        try:
            batch.language_model_loss(torch.ones(1, 2), torch.full((1, 2), loss))
        except RuntimeError as error:
            if "Unexpected result" not in str(error):
                raise
            return number
    return len(losses)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_each_micro_batch_is_checked_by_itself(monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    assert _step(monkeypatch, "micro-batch", 1.0, bad, 1.0) == 1


@pytest.mark.parametrize("losses", [(math.nan, 1.0, 1.0), (1.0, 1.0, math.inf), (math.inf, -math.inf, 1.0)])
def test_a_step_is_stopped_at_its_last_micro_batch(monkeypatch: pytest.MonkeyPatch, losses: tuple[float, ...]) -> None:
    assert _step(monkeypatch, "step", *losses) == MICRO_BATCHES - 1


def test_a_good_step_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert _step(monkeypatch, "step", 1.0, 2.0, 3.0) == MICRO_BATCHES
    assert _step(monkeypatch, "step", 1.0, math.nan, 3.0) == MICRO_BATCHES - 1
    assert _step(monkeypatch, "step", 1.0, 2.0, 3.0) == MICRO_BATCHES


def test_evaluation_is_checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        assert _step(monkeypatch, "step", math.nan) == 0
