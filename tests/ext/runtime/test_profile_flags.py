"""A profile that would leave no trace is refused before the start."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_ext.errors import UserError
from megatron_ext.runtime import checks


def _args(**changed: object) -> Namespace:
    plain = {
        "profile": True, "use_pytorch_profiler": True, "profile_step_start": 10, "profile_step_end": 12,
        "train_iters": 12, "tensorboard_dir": "run/tensorboard", "moe_ext_run_dir": None,
    }  # fmt: skip
    return Namespace(**{**plain, **changed})


@pytest.mark.parametrize(
    "changed",
    [{}, {"train_iters": None}, {"profile": False, "use_pytorch_profiler": False, "tensorboard_dir": None},
     {"use_pytorch_profiler": False, "tensorboard_dir": None}],
)  # fmt: skip
def test_what_works_is_let_through(changed):
    checks.check_profiling(_args(**changed))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"profile": False}, "pass --profile too"),
        ({"profile_step_end": 10}, "no step would be profiled"),
        ({"train_iters": 11}, "pass --train-iters 12 or more"),
        ({"tensorboard_dir": None, "moe_ext_run_dir": "runs/x"}, "pass --tensorboard-dir runs/x/tensorboard"),
    ],
)
def test_what_leaves_no_trace_is_refused(changed, said):
    with pytest.raises(UserError, match=said):
        checks.check_profiling(_args(**changed))
