"""Small starts through the plain entry point, and what a log says that a lenient load left out.

`MOE_EXT_AGREE_DEVICE=cpu` rehearses where there is no GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DEVICE = os.environ.get("MOE_EXT_AGREE_DEVICE", "cuda")
ROOT = Path(__file__).resolve().parents[2]
# Transformer Engine's layers and the preset, where there is a GPU.
FAST = ("--moe-grouped-gemm", "--moe-ext-preset", "hopper") if DEVICE == "cuda" else ()
# A CPU's checkpoint lacks what Transformer Engine's norms keep besides their weights (nothing without FP8).
LENIENT = ("--dist-ckpt-strictness", "log_all")


def train(device: str, *flags: str) -> str:
    """Train on one process; return what it printed, with its errors first where it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    return run_command([*command, "-m", "megatron_ext.cli", "train", "--device", device, "--", *flags])


def run_command(command: list[str]) -> str:
    """Run a command from the root and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, cwd=ROOT)
    log = done.stdout + done.stderr
    # Which error, before the end: one that lists keys fills the rest.
    errors = [line[:400] for line in log.splitlines() if re.search(r"\b\w*(Error|Exception)\b:", line)]
    assert done.returncode == 0, "\n".join((*errors, log[-4000:]))
    return log


def losses(log: str) -> list[float]:
    """Return the lm losses that a log printed, step by step."""
    return [float(value) for value in re.findall(r"lm loss: ([0-9.E+-]+)", log)]


def weights_left_out(log: str) -> set[str]:
    """Return the keys that a lenient load did not find, without Transformer Engine's extra states."""
    lacking = re.findall(r"Unexpected keys \(for this rank\): \{([^}]*)\}", log)
    keys = {key.strip("' ") for found in lacking for key in found.split(",") if key.strip()}
    return {key for key in keys if not key.endswith("_extra_state")}
