"""On a machine that has Transformer Engine, `--device cpu` trains without it: its functions know GPUs only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
from megatron_ext.runtime import cpu
cpu.install()
from megatron.core.transformer.moe import moe_utils
from megatron_ext.runtime import wgrad
assert moe_utils.te_general_gemm is None, "the router would multiply by Transformer Engine"
assert not wgrad.is_available(), "the output layer would sum its gradient through Transformer Engine"
"""


def test_nothing_is_computed_by_transformer_engine(tmp_path: Path) -> None:
    # Stands for the real one, which needs a GPU: any use of it fails.
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('Transformer Engine was imported')\n")
    about = tmp_path / "transformer_engine-2.20.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.20.2\n")
    path = os.pathsep.join((str(tmp_path), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-3000:]
