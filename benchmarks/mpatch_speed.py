"""How long the patch queue takes on the real release: `fetch` from the cache, apply, verify, status; and all gates.

Usage: .venv/bin/python benchmarks/mpatch_speed.py [--repeat N] [--json FILE]
Targets: the four verbs together under 3 s, the gates (`mpatch check`) under 60 s, on two idle cores. Each round starts
from an empty build folder; the download comes from the cache, as in CI. Times are wall seconds of real processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERBS = ("fetch", "apply", "verify", "status")
TARGETS = {"fetch apply verify status": 3.0, "check": 60.0}


def timed(root: Path, *words: str) -> float:
    """Run mpatch as a process; return its wall seconds."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "tools.mpatch", words[0], "--root", str(root), *words[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    took = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"mpatch {' '.join(words)} ended with {done.returncode}\n{done.stderr}")
    return took


def one_round(folder: Path) -> dict[str, float]:
    """Time every verb in a fresh checkout."""
    root = folder / "checkout"
    root.mkdir()
    for name in ("upstream.toml", "patches", "tests"):
        (root / name).symlink_to(ROOT / name)
    took = {verb: timed(root, verb) for verb in VERBS}
    took["fetch apply verify status"] = sum(took.values())
    took["second apply"] = timed(root, "apply")
    took["check"] = timed(root, "check")
    return took


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("MPATCH_CACHE", str(ROOT / "build" / "cache"))
    rounds = []
    for _ in range(options.repeat + 1):  # the first warms the file cache and the download
        folder = Path(tempfile.mkdtemp())
        rounds.append(one_round(folder))
        shutil.rmtree(folder)
    rows = []
    for name in rounds[0]:
        values = [one[name] for one in rounds[1:]]
        rows.append({"what": name, "median_s": statistics.median(values), "min_s": min(values), "max_s": max(values),
                     "target_s": TARGETS.get(name)})  # fmt: skip
    print(f"{'what':<28}{'median s':>10}{'min':>8}{'max':>8}{'target':>8}")
    for row in rows:
        target = f"{row['target_s']:.0f}" if row["target_s"] else "-"
        print(f"{row['what']:<28}{row['median_s']:>10.2f}{row['min_s']:>8.2f}{row['max_s']:>8.2f}{target:>8}")
    if options.json:
        options.json.write_text(json.dumps({"rounds": options.repeat, "rows": rows, "load": os.getloadavg()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
