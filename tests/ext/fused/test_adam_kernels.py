"""The AdamW kernel in Triton's interpreter against fp64, and Megatron's optimizer with it on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _interpreted(script: str, *, ranks: int = 1, words: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a script in processes of its own: Triton reads the interpreter switch when it is imported."""
    environ = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    start = [sys.executable, "-W", "ignore"]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*start, str(Path(__file__).with_name(script)), "cpu", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110)


@pytest.mark.timeout(120)
def test_kernel_is_as_exact_as_torch() -> None:
    done = _interpreted("adam_check.py", words=("0", "12"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 cases of 20 steps within fp32 rounding" in done.stdout


@pytest.mark.timeout(120)
def test_two_ranks_with_shards_that_start_inside_of_weights() -> None:
    done = _interpreted("adam_megatron_check.py", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for rank in (0, 1):
        assert f"the fused step equals upstream's on cpu, rank {rank}" in done.stdout
