"""Proof of gpu/swiglu: Megatron's SwiGLU goes through our kernels where they can run, recomputation included.

The kernels run for real, in Triton's interpreter; tests/gpu runs the same script compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "fused" / "megatron_check.py"


def test_megatron_calls_the_kernels() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "cpu"], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "Megatron calls the kernels" in done.stdout
