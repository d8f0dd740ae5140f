"""The dispatch kernels on a GPU, and a whole layer over NCCL. Run by pytest, or bare:

    python tests/gpu/test_dispatch_kernels.py

Kernels need one GPU; the layer runs on as many as there are (one GPU: one rank).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import seed_ranges

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "ext" / "dispatch"
SEEDS = 48  # each three random checks
SHAPES = 12  # of whole layers, each of them compiled anew

try:
    import pytest

    pytestmark = pytest.mark.gpu
except ImportError:  # a bare GPU machine
    pass


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def test_kernels_equal_the_torch_path_bit_for_bit() -> None:
    print("\n".join(seed_ranges.run(CASES / "kernel_check.py", "cuda", SEEDS)))


def test_layer_over_nccl_equals_dense() -> None:
    import torch

    ranks = torch.cuda.device_count()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(CASES / "nccl_check.py"), str(SHAPES)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=190)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout.strip())


if __name__ == "__main__":
    test_kernels_equal_the_torch_path_bit_for_bit()
    test_layer_over_nccl_equals_dense()
