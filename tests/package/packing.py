"""Building wheel and sdist as pip builds them, and environments without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PURE = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV", "MPATCH_TREE"}


def build(source: Path, folder: Path, **more: str) -> Path:
    """Return the wheel that pip makes of a checkout or an sdist, with the build requirements of this environment."""
    words = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, env={**os.environ, **more}, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (made,) = folder.glob("*.whl")
    return made


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel in it; run commands from `home`, which is no checkout."""

    folder: Path
    home: Path

    @property
    def site(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in PURE}
        return {**kept, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.folder / "bin" / words[0]), *words[1:]],
            cwd=self.home,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=300,
        )

    def uv(self, *words: str) -> None:
        """Run a verb of `uv pip` on this environment."""
        uv = Path(sys.executable).with_name("uv")
        python = str(self.folder / "bin" / "python")
        done = subprocess.run(
            [str(uv), "pip", *words, "--python", python], capture_output=True, text=True, timeout=600, cwd=self.home
        )
        assert done.returncode == 0, done.stderr

    def listing(self) -> set[str]:
        """Return every file and folder, bytecode of other packages left out."""
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}


def environment(folder: Path, home: Path, python: str = sys.executable) -> Installed:
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    home.mkdir(parents=True, exist_ok=True)
    return Installed(folder, home)


def build_sdist(folder: Path, **more: str) -> None:
    code = f"from tools.package import backend; backend.build_sdist({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
