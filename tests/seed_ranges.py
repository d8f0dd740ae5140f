"""Runs a script that checks random cases as several processes: most of their time goes into compiling each shape."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(script: Path, device: str, count: int, processes: int | None = None, timeout: float = 180) -> list[str]:
    """Run `SCRIPT DEVICE FIRST LAST` over the seeds below `count`, cut into ranges; return what each printed.

    Args:
        script: Takes the device and the range's first seed and the one behind its last.
        device: `cuda` or `cpu`.
        count: How many seeds.
        processes: How many ranges at once; by default as many as there are cores, at most 8.
        timeout: Seconds after which a range is killed.

    Raises:
        AssertionError: A range failed; what it printed is in the message.
        subprocess.TimeoutExpired: A range took too long.
    """
    processes = min(processes or min(8, os.cpu_count() or 1), count)
    bounds = [count * number // processes for number in range(processes + 1)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    def one(bound: tuple[int, int]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), device, *map(str, bound)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)

    with ThreadPoolExecutor(processes) as pool:
        done = list(pool.map(one, pairwise(bounds)))
    assert not any(range_.returncode for range_ in done), "\n".join(
        range_.stdout + range_.stderr for range_ in done if range_.returncode
    )
    return [range_.stdout.strip() for range_ in done]
