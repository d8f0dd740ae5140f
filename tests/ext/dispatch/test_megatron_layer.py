"""Real Megatron MoE layers: `dedup` and `twohop` give what `alltoall` gives, forward and every gradient."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(400)
def test_layers_equal_upstreams_alltoall_over_four_ranks(root: Path) -> None:
    script = Path(__file__).with_name("megatron_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), "layers_equal_alltoall", "4"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "4 ranks agree" in done.stdout
