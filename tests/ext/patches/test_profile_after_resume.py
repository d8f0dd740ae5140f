"""Proof of profile-after-resume: the profiled iterations are those of the flags, wherever a run goes on from.

The block of `train()` that makes the profiler runs as it stands, with torch's real profiler, in a loop like Megatron's.
"""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training import training
from source import function

from megatron_ext.trace import read_traces

pytestmark = pytest.mark.usefixtures("world")


def _profiler(args: SimpleNamespace, iteration: int) -> Any:
    """Run the `if` of train() that makes the profiler."""
    train = function(training.__name__, "train")
    (block,) = (n for n in train.body if isinstance(n, ast.If) and "torch.profiler.schedule(" in ast.unparse(n))
    names: dict[str, Any] = {"args": args, "iteration": iteration, "torch": torch, "Path": Path, "prof": None}
    exec(compile(ast.Module([block], []), "train", "exec"), names)
    return names["prof"]


@pytest.mark.parametrize(
    ("done", "first", "end", "expected"),
    [
        (0, 3, 5, [3, 4]),  # from the start: as upstream
        (4, 7, 9, [7, 8]),
        (4, 5, 7, [5, 6]),  # the first iteration after the resume
        (6, 5, 9, [7, 8]),  # in the middle of what was to be profiled
        (7, 5, 8, []),  # at its end
        (20, 5, 8, []),  # after it
    ],
)
def test_profiled_iterations_are_those_of_the_flags(tmp_path, done, first, end, expected):
    args = SimpleNamespace(
        profile=True, profile_ranks=[], use_pytorch_profiler=True, profile_step_start=first, profile_step_end=end,
        pytorch_profiler_collect_shapes=False, pytorch_profiler_collect_callstack=False,
        pytorch_profiler_collect_chakra=False, tensorboard_dir=str(tmp_path / "tensorboard"), train_iters=done + 12,
    )  # fmt: skip
    profiler = _profiler(args, done)
    try:
        for iteration in range(done + 1, args.train_iters + 1):
            profiler.step()
            with torch.profiler.record_function(f"iteration {iteration}"):
                torch.ones(3).add_(1)
            if iteration == end:
                profiler.stop()
    finally:
        # One that is left running takes the process down at its end.
        with contextlib.suppress(RuntimeError):
            profiler.stop()
    written = tmp_path / "torch_profile"
    names = read_traces([written])[0].names if written.exists() else []
    found = sorted(int(name.split()[1]) for name in names if name.startswith("iteration "))
    assert found == expected, "other iterations were profiled"
