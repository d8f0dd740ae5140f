"""Runs inside the environment that trains, and looks without importing: prints JSON for `mpatch doctor`.

Started by path with that environment's Python, so it uses nothing but the standard library. Finding `megatron.core`
executes no Megatron code: its parent is a namespace package.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys

TOP = ("core", "training", "post_training", "rl", "inference")
PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "apex": "apex",
    "transformer_engine": "transformer-engine",
    "grouped_gemm": "nv-grouped-gemm",
    "deep_ep": "deep-ep",
    "trackio": "trackio",
    "megatron_ext": "megatron-moe",
}


def version(name: str) -> str:
    """Return the version of a distribution, empty when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed(name: str) -> list[str]:
    """Return version and folder of a distribution, nothing when there is none."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return []
    return [found.version, str(found.locate_file(""))]


def where(name: str) -> str:
    """Return the file of a module, empty when there is none."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return ""
    if found is None:
        return ""
    return found.origin or next(iter(found.submodule_search_locations or []), "")


def modules(portions: list[str]) -> dict[str, str]:
    """Return the file that each megatron.* module would come from, the first portion of the namespace first."""
    found: dict[str, str] = {}
    for portion in portions:
        for top in sorted(os.listdir(portion)) if os.path.isdir(portion) else []:
            folder = os.path.join(portion, top)
            if "megatron." + top in found or not os.path.isdir(folder):
                continue
            for base, folders, files in os.walk(folder):
                folders[:] = [one for one in folders if one != "__pycache__"]
                for file in files:
                    if file.endswith(".py"):
                        path = os.path.join(base, file)
                        name = "megatron." + os.path.relpath(path, portion)[:-3].replace(os.sep, ".")
                        found[name[:-9] if name.endswith(".__init__") else name] = path
    return found


def main() -> None:
    """Print what is there."""
    try:
        spec = importlib.util.find_spec("megatron")
    except (ImportError, ValueError):
        spec = None
    portions = list(spec.submodule_search_locations or []) if spec else []
    json.dump(
        {
            "python": sys.version.split()[0],
            "executable": sys.executable,
            "prefix": sys.prefix,
            "portions": portions,
            "regular": bool(spec and spec.origin),
            "modules": modules(portions),
            "megatron_core_installed": installed("megatron-core"),
            "packages": {name: {"file": where(name), "version": version(dist)} for name, dist in PACKAGES.items()},
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
