"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout's root."""
    return Path(__file__).resolve().parents[1]
