from __future__ import annotations

import shutil

import pytest
from lab import Lab, make_lab, with_three


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Lab:
    """A checkout with release 1.0 and an empty series."""
    monkeypatch.delenv("MPATCH_CACHE", raising=False)
    return make_lab(tmp_path)


@pytest.fixture(scope="session")
def _three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    with_three(make_lab(folder))
    return folder


@pytest.fixture
def three(_three, tmp_path, monkeypatch) -> Lab:
    """A checkout with three patches, applied. Made once and copied: the copy also shows that a checkout can move."""
    monkeypatch.delenv("MPATCH_CACHE", raising=False)
    shutil.copytree(_three, tmp_path / "copy", symlinks=True)
    return Lab(tmp_path / "copy" / "checkout", tmp_path / "copy" / "shelf")
