"""The tracking tests once more with the newest Trackio on the index, beside the pinned one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def install(target: Path, *what: str) -> None:
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "pip", "install", "-q", "--python", sys.executable, "--target", str(target), "--no-deps", *what]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def unmet(package_folder: Path) -> list[str]:
    """Return the requirements of a package in a folder that this environment does not meet."""
    script = "import json, importlib.metadata as m; print(json.dumps(m.requires('trackio') or []))"
    import json

    found = subprocess.run([sys.executable, "-c", script], env=overlaid(package_folder), capture_output=True, text=True)
    missing = []
    for text in json.loads(found.stdout):
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            met = need.specifier.contains(version(need.name), prereleases=True)
        except PackageNotFoundError:
            met = False
        if not met:
            missing.append(f"{need.name}{need.specifier}")
    return missing


def overlaid(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


@pytest.mark.nightly
def test_the_tracking_tests_pass_with_the_newest_trackio(tmp_path: Path) -> None:
    assert requires("trackio"), "the pinned one is installed"
    newest = tmp_path / "newest"
    install(newest, "--upgrade", "trackio")
    needed = unmet(newest)
    if needed:
        install(newest, *needed)
    script = "import trackio; print(trackio.__version__, trackio.__file__)"
    seen = subprocess.run([sys.executable, "-c", script], env=overlaid(newest), capture_output=True, text=True)
    assert str(newest) in seen.stdout, seen.stderr
    print(f"newest Trackio: {seen.stdout.split()[0]}, pinned: {version('trackio')}, installed beside it: {needed}")
    command = [sys.executable, "-m", "pytest", str(HERE), "-q", "-m", "not nightly", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=overlaid(newest), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
