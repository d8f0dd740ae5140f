"""Print the build arguments of an image, each version read from upstream.toml.

Usage: python docker/build_args.py docker|env          e.g. docker build $(python docker/build_args.py docker) -f
docker/Dockerfile .
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))


def build_args() -> dict[str, str]:
    """Return argument name -> value, the same names as the Dockerfiles' ARG lines."""
    from tools.mpatch.pins import load_pins

    raw = load_pins(REPO / "upstream.toml").raw
    recorded = REPO / "build" / "pins.json"
    digest = json.loads(recorded.read_text())["series_digest"] if recorded.exists() else "unknown"
    return {
        "BASE": raw["container"]["base"],
        "CPU_BASE": raw["container"]["cpu_base"],
        "CPU_SUITE": raw["container"]["cpu_suite"],
        "EFA_INSTALLER": raw["efa"]["installer"],
        "OFI_NCCL": raw["efa"]["ofi_nccl"],
        "DEEPEP": raw["deepep"]["sgl-deep-ep"],
        "GROUPED_GEMM": raw["packages"]["nv-grouped-gemm"],
        "TRACKIO": raw["packages"]["trackio"],
        "MEGATRON": raw["bases"][raw["default_base"]]["version"],
        "SERIES_DIGEST": digest,
    }


def main(words: list[str]) -> int:
    """Print the arguments in the form asked for."""
    if words not in (["docker"], ["env"]):
        print(__doc__, file=sys.stderr)
        return 64
    for name, value in build_args().items():
        print(f"--build-arg {name}={value}" if words == ["docker"] else f"{name}={value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
