"""The monitor's Triton kernels, in the interpreter (no GPU), against the torch path and NumPy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_the_kernels_agree_with_the_torch_path():
    """In a process of its own: Triton reads the interpreter switch when it is imported."""
    script = Path(__file__).with_name("tally_kernel_check.py")
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, str(script), "cpu"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases agree" in done.stdout
