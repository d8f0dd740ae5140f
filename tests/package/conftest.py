"""One wheel and one sdist for all tests of the package."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from packing import ROOT, Installed, build, build_sdist, environment


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def archive(wheel: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build_sdist(folder)
    (made,) = folder.glob("*.tar.gz")
    return made


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Installed:
    """The wheel in a fresh environment that borrows this one's packages, without what its .pth files add."""
    made = environment(tmp_path / "venv", tmp_path / "home")
    import torch

    (made.site / "borrowed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    made.uv("install", "-q", "--no-deps", "--no-index", str(wheel))
    return made
