"""The dispatch kernels on a GPU, and a whole layer over NCCL. Run by pytest, or bare:

    python tests/gpu/test_dispatch_kernels.py

Kernels need one GPU; the layer runs on as many as there are (one GPU: one rank).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "ext" / "dispatch"

try:
    import pytest

    pytestmark = pytest.mark.gpu
except ImportError:  # a bare GPU machine
    pass


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def test_kernels_equal_the_torch_path_bit_for_bit() -> None:
    done = subprocess.run(
        [sys.executable, str(CASES / "kernel_check.py"), "cuda"], env=_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout.strip())


def test_layer_over_nccl_equals_dense() -> None:
    import torch

    ranks = torch.cuda.device_count()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(CASES / "nccl_check.py")], env=_environment(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout.strip())


if __name__ == "__main__":
    test_kernels_equal_the_torch_path_bit_for_bit()
    test_layer_over_nccl_equals_dense()
