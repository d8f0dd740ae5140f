"""The SwiGLU kernels: Triton, in its interpreter, against fp64; and what is left to upstream's function."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext.fused import swiglu


def _interpreted(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own: Triton reads the interpreter switch when it is imported."""
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    path = str(Path(__file__).with_name(script))
    return subprocess.run([sys.executable, path, "cpu", *words], env=environ, capture_output=True, text=True)


@pytest.mark.timeout(120)
def test_kernels_are_within_one_rounding_of_fp64() -> None:
    done = _interpreted("swiglu_check.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 cases within one rounding" in done.stdout


def test_the_cpu_is_left_to_upstream() -> None:
    assert not swiglu.takes(torch.zeros(2, 4))


class _Quantized(torch.Tensor):
    """A subclass, as Transformer Engine's FP8 tensors are: its values need not be what its dtype says."""


ROWS = torch.zeros(2, 4)
WEIGHTS = torch.ones(2, 1)


@pytest.mark.parametrize(
    ("y", "weights"),
    [
        pytest.param(ROWS.double(), None, id="fp64"),
        pytest.param(torch.zeros(2, 5), None, id="no two halves"),
        pytest.param(torch.zeros(2, 2, 4), None, id="three dimensions"),
        pytest.param(ROWS.as_subclass(_Quantized), None, id="subclass"),
        pytest.param(ROWS, WEIGHTS.double(), id="fp64 weights"),
        pytest.param(ROWS, torch.ones(1, 1), id="one weight for all rows"),
        pytest.param(ROWS, torch.ones(2, 2), id="a weight a column"),
        pytest.param(ROWS, torch.ones(2, 1, device="meta"), id="another device"),
    ],
)
def test_what_the_kernels_do_not_do_is_left_to_upstream(
    monkeypatch: pytest.MonkeyPatch, y: torch.Tensor, weights: torch.Tensor | None
) -> None:
    monkeypatch.setattr(swiglu, "_kernels_run", lambda y: True)  # there is no GPU here
    assert swiglu.takes(ROWS, WEIGHTS)
    assert not swiglu.takes(y, weights)


def test_a_variable_leaves_all_to_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swiglu, "_kernels_run", lambda y: True)
    monkeypatch.setenv(swiglu.KERNELS_VARIABLE, "torch")
    assert not swiglu.takes(ROWS, WEIGHTS)
