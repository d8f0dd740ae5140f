"""Proof of triton-import: a MoE model can be imported where triton is not installed."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_TRITON = """
import sys
from megatron_ext.runtime import cpu
cpu.install()
sys.modules["triton"] = sys.modules["triton.language"] = None
import megatron.core.models.gpt
import megatron.core.transformer.moe.moe_layer
import megatron.training
"""


def test_megatron_is_imported_without_triton() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
