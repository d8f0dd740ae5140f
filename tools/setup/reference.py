"""Build the API reference of megatron_ext from its docstrings, as pages that open offline.

Usage: .venv/bin/python tools/setup/reference.py [FOLDER]      (default build/api; `make docs`)

What a room offers is what its `__init__` names in `__all__`; a room without one shows its modules.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import sys
import warnings
from pathlib import Path

import pdoc

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_ext"


def main(folder: Path) -> int:
    """Write the pages; a name that cannot be documented is an error, not a gap."""
    from megatron_ext.install import about_record

    warnings.filterwarnings("error", module=r"pdoc\..*")
    _resolve_late_names()
    version = about_record()["version"]
    # The docstrings' sections (Args, Raises) are Google's. The search index and the styles are in the pages.
    pdoc.render.configure(docformat="google", show_source=False, footer_text=f"megatron-moe {version}")
    shutil.rmtree(folder, ignore_errors=True)
    pdoc.pdoc(PACKAGE, output_directory=folder)
    print(f"{folder}/index.html: {len(list(folder.rglob('*.html')))} pages")
    return 0


def rooms() -> list[str]:
    """Return the packages of megatron_ext, by name."""
    package = importlib.import_module(PACKAGE)
    return [PACKAGE, *(found.name for found in pkgutil.iter_modules(package.__path__, f"{PACKAGE}.") if found.ispkg)]


def _resolve_late_names() -> None:
    """Load what a room imports only when it is asked for: pdoc looks into the module, it does not ask."""
    for name in rooms():
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            setattr(module, public, getattr(module, public))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "api"))
