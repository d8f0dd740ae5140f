"""The matrix: shapes times parallel layouts of source and target, 4 real ranks over gloo, one process start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matrix_child import CASES, SHAPES

pytestmark = pytest.mark.ranks
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory, root) -> dict:
    folder = tmp_path_factory.mktemp("matrix")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo",
           "PYTHONPATH": f"{root}:{root / 'build/megatron'}:{HERE}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
               str(HERE / "matrix_child.py"), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    path = folder / "results.json"
    assert path.exists(), done.stderr[-3000:]
    return json.loads(path.read_text())


def test_there_are_at_least_40_cases():
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_first_loss_is_the_dense_one(results, name):
    found = results.get(name, "not reached")
    assert isinstance(found, dict), found
    bf16 = "bf16" in name
    assert found["moe"] == pytest.approx(found["dense"], abs=1e-3 if bf16 else 1e-5), SHAPES[name.split(" / ")[0]]
    assert found["apart"] == 0.0, "the path inside training gives other bits than the offline one"
    assert abs(found["fresh"] - found["dense"]) > 2e-3
