"""Proof of gpu/adam: Megatron's optimizer takes our step where it can, and it is upstream's within fp32 rounding.

The kernel runs for real, in Triton's interpreter; tests/gpu runs the same script compiled, beside Transformer Engine.
What a checkpoint carries needs another patch for torch's Adam: tests/ext/fused runs those checks, on two ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "fused" / "adam_megatron_check.py"
CHECKS = ("steps", "moved", "replaced", "hook", "zeros", "skipped", "upstream")


def test_megatron_takes_the_fused_step() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "cpu", *CHECKS], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "the fused step equals upstream's on cpu, rank 0" in done.stdout
