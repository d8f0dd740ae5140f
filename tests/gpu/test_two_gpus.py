"""Expert parallelism over NCCL on two GPUs, in one start. Run by pytest, or bare: python tests/gpu/test_two_gpus.py"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.version.cuda or torch.cuda.device_count() < 2,
        reason=f"needs two GPUs, found {torch.cuda.device_count()}",
    ),
]

TESTS = Path(__file__).resolve().parents[1]
PLACES = (TESTS.parent, TESTS, *(TESTS / name for name in ("ranks", "ext/dispatch", "ext/upcycle", "ext/observe")))
CHECKS = ("transfers", "layers", "monitor", "upcycling", "checkpoints")


def run(*checks: str, timeout: float = 220) -> str:
    """Start the job on two ranks and return what it printed.

    Raises:
        AssertionError: A check failed; its traceback is in the message.
    """
    paths = [*map(str, PLACES), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    # Transformer Engine multiplies fp32 in TF32 (the router's logits): too coarse to compare with formulas in fp64.
    environment["NVIDIA_TF32_OVERRIDE"] = "0"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # Into a file: what a killed rank has started would hold a pipe open.
    with tempfile.TemporaryFile("w+") as out:
        command.append(str(TESTS / "gpu" / "two_gpus.py"))
        job = subprocess.Popen([*command, *checks], env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            status = job.wait(timeout)
        except subprocess.TimeoutExpired:
            # Not killed: torchrun ends its ranks, which are in sessions of their own.
            job.terminate()
            status = job.wait()
        out.seek(0)
        printed = out.read()
    assert status == 0, printed[-6000:]
    return printed


def test_every_check_over_nccl() -> None:
    printed = run()
    assert all(f"{check}: " in printed for check in CHECKS), printed[-3000:]


if __name__ == "__main__":
    print("\n".join(line for line in run().splitlines() if line.startswith(CHECKS)))
