"""Compile Megatron's dataset helper once, from the verified tree's own source, and put it beside it.

Usage: .venv/bin/python tools/setup/build_helpers.py [TREE]      (default build/megatron)

The release on the index ships neither the compiled helper nor a Makefile, and upstream would compile on rank 0 at the
start of training. Kept by content: the same source, Python and pybind11 are never compiled twice.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Without symbols (-s): they hold the paths of the build.
FLAGS = ("-O3", "-Wall", "-shared", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-s")


def main(tree: Path) -> int:
    """Build if needed; return 0, or 1 with a message that says what is missing."""
    folder = tree / "megatron" / "core" / "datasets"
    source = folder / "helpers.cpp"
    if not source.is_file():
        print(f"error: {source} does not exist; run `python -m tools.mpatch apply` first", file=sys.stderr)
        return 1
    cached = cached_helper(source)
    if cached is None:
        return 1
    target = folder / cached.name
    if not target.is_file() or target.read_bytes() != cached.read_bytes():
        part = target.with_suffix(".part")
        shutil.copy2(cached, part)
        os.replace(part, target)
        print(f"[setup] dataset helper: {target}")
    else:
        print("[setup] dataset helper: up to date")
    return 0


def cached_helper(source: Path) -> Path | None:
    """Return the compiled helper of this source and this Python, compiling it once; None when that failed."""
    name = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    cached = ROOT / "build" / "helpers" / _key(source) / name
    return cached if cached.is_file() or compile_helper(source, cached) else None


def _key(source: Path) -> str:
    import pybind11

    told = (source.read_bytes(), sys.version.encode(), pybind11.__version__.encode(), " ".join(FLAGS).encode())
    return hashlib.sha256(b"\0".join(told)).hexdigest()[:16]


def compile_helper(source: Path, target: Path) -> bool:
    """Compile to `target`, the same bytes wherever source, target and Python lie; say why where it fails."""
    import pybind11

    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        print(
            "error: no C++ compiler (c++, g++ or clang++) for Megatron's dataset helper\n"
            "try:   install one (Debian: apt-get install g++), or set CXX=/path/to/compiler; then run this again",
            file=sys.stderr,
        )
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        places = {"pybind11": pybind11.get_include(), "python": sysconfig.get_path("include"), ".": str(source.parent)}
        command = [compiler, *FLAGS, *(f"-ffile-prefix-map={path}={name}" for name, path in places.items())]
        command += [f"-I{places[name]}" for name in ("pybind11", "python")]
        done = subprocess.run([*command, str(source), "-o", str(built)], capture_output=True, text=True)
        if done.returncode:
            hint = "the Python headers may be missing (Debian: python3-dev)" if "Python.h" in done.stderr else ""
            print(f"error: {compiler} could not build {source}\n{done.stderr}\n{hint}", file=sys.stderr)
            return False
        os.replace(built, target)
    return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "megatron"))
