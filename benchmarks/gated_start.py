"""Start a GPU program up to its imports, wait until a file exists, then run it: a next run's imports cost no time.

    python benchmarks/gated_start.py GATE SCRIPT ARGUMENTS...

Nothing touches the GPU before GATE exists, so what runs meanwhile has it alone. GATE holds the port where the ranks
meet.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import time
from pathlib import Path

# What a training start imports, the slowest first.
_SLOW = ("torch", "transformer_engine.pytorch", "megatron.training", "megatron_ext.runtime.batch", "transformers")


def main() -> None:
    gate, script, *words = sys.argv[1:]
    # Before the CPU runtime nothing may import Megatron.
    for name in _SLOW if "cpu" not in words else ():
        importlib.import_module(name)
    while not Path(gate).exists():
        time.sleep(0.05)
    os.environ["MASTER_PORT"] = Path(gate).read_text()
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
