"""Set-up finds a Python wherever it is, or says in one line what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _find(root: Path, *, path: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path, "HOME": str(home), **variables}
    script = root / "tools" / "setup" / "find_python.sh"
    return subprocess.run(
        ["/bin/bash", str(script), "3.12"], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def bare_path(tmp_path: Path) -> str:
    """A PATH with the shell's own tools and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "env", "sed", "cat"):
        for place in ("/bin", "/usr/bin"):
            if (Path(place) / name).exists() and not (folder / name).exists():
                (folder / name).symlink_to(Path(place) / name)
    return str(folder)


def test_python_under_pyenv_is_found_though_it_is_not_the_active_one(
    root: Path, tmp_path: Path, bare_path: str
) -> None:
    place = tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin"
    place.mkdir(parents=True)
    wrapper = place / "python3.12"
    wrapper.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n')
    wrapper.chmod(0o755)
    done = _find(root, path=bare_path, home=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, str(wrapper))


def test_no_python_is_one_line_that_says_what_to_do(root: Path, tmp_path: Path, bare_path: str) -> None:
    done = _find(root, path=bare_path, home=tmp_path)
    if done.returncode == 0:
        pytest.skip("this machine has a system-wide pyenv")
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "PYTHON=/path/to/python" in done.stderr


def test_a_python_that_was_named_and_does_not_start_is_an_error(root: Path, tmp_path: Path, bare_path: str) -> None:
    done = _find(root, path=bare_path, home=tmp_path, PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "/nowhere/python" in done.stderr
