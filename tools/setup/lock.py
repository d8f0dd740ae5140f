"""Rewrite the hashed requirement files from pyproject.toml's names and upstream.toml's pins.

Usage: .venv/bin/python tools/setup/lock.py     (needs uv, which bootstrap.txt installs, and a package index)

No address is written: the files name versions and hashes, and each user's own index serves them.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from tools.mpatch.pins import load_pins

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tools" / "requirements"
# Beside the development extra and what the wheel is built with: bokeh (the report's interactive plots are tested with
# it), and the exact versions that upstream's own style check uses (mpatch upstream-prep).
DEV_ALSO = ("bokeh", "isort==5.13.2", "black==26.*")


def main() -> int:
    """Write train.txt, dev.txt and bootstrap.txt."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = told["project"]
    packages = load_pins(ROOT / "upstream.toml").packages
    train = [f"{name}=={packages[name]}" if name in packages else name for name in project["dependencies"]]
    # setuptools comes with the build's requirements; torch.utils needs it at run time, and not every torch brings it.
    dev = [*train, *told["build-system"]["requires"], *project["optional-dependencies"]["dev"], *DEV_ALSO]
    _compile(train, OUT / "train.txt")
    _compile(dev, OUT / "dev.txt")
    _compile(["uv"], OUT / "bootstrap.txt")
    return 0


def _compile(names: list[str], target: Path) -> None:
    command = [
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--python-version",
        "3.12",
        "--generate-hashes",
        "--no-header",
        "--no-emit-index-url",
        "--no-emit-find-links",
        "-",
        "--output-file",
        str(target),
    ]
    uv = Path(sys.executable).with_name("uv")
    command[0] = str(uv) if uv.exists() else "uv"
    subprocess.run(command, input="\n".join(names) + "\n", text=True, check=True, cwd=ROOT)
    print(f"wrote {target.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
