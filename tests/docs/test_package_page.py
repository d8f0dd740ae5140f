"""The walk of docs/package.md: its blocks are run in order in a fresh clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks

PAGE = ROOT / "docs" / "package.md"
EMPTY = "python3 -m venv env\n"


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_every_command_of_the_page_works(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True, timeout=120)
    fenced = [text for _, text in blocks(PAGE) if not text.startswith(("mpatch bundle", "bash carried"))]
    assert len(fenced) == 3
    # The locked packages first: pip would resolve and download gigabytes for the same result.
    uv, python = Path(sys.executable).with_name("uv"), "env/bin/python"
    filled = f"{EMPTY}{uv} pip install -q --python {python} --require-hashes -r tools/requirements/train.txt\n"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(os.path.realpath(sys.executable))
    env = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    env |= {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "MPATCH_CACHE": os.environ.get("MPATCH_CACHE") or str(ROOT / "build" / "cache"),
        "DENSE_STEPS": "10",
        "MOE_STEPS": "6",
    }
    for text in fenced:
        script = "set -euo pipefail\n" + text.replace(EMPTY, filled)
        log = tmp_path / "log"
        with log.open("w") as out:
            done = subprocess.run(["bash", "-c", script], cwd=clone, env=env, stdout=out, stderr=out, timeout=1200)
        assert done.returncode == 0, f"{text}\n{log.read_text()[-3000:]}"
    assert (clone / "try" / "runs" / "quickstart" / "report.html").is_file()
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    # The page's own folders aside, building and running leave the checkout as it was.
    assert [line for line in status.stdout.splitlines() if line[3:] not in ("env/", "try/")] == []
