"""The largest run that is promised: 10,000 steps, 64 layers, 512 experts, through the real writers and commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.nightly
def test_the_largest_run_keeps_the_promised_sizes_and_times(tmp_path: Path, root: Path) -> None:
    """Minutes of work, so it is the benchmark itself, each command once; what it checks stands at its top."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(root / "benchmarks" / "observe_sizes.py"), "--per-layer", "--repeat", "1"]
    done = subprocess.run([*command, "--json", str(figures)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(figures.read_text())
    assert found["met"]
    assert found["figures"]["report opens, s"] is not None, "no Chromium: tools/setup/system.sh installs it"
    # The record is whole: what is thinned is thinned in the page and in the frames, never in the metrics.
    assert found["rows"] == found["trackio_steps"] == 10_000
