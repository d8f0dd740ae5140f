"""The job of tests/gpu/test_two_gpus.py over gloo: dispatchers, monitor, upcycling and checkpoints at EP 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))

import test_two_gpus

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("check", test_two_gpus.CHECKS)
def test_over_gloo(check: str) -> None:
    assert f"{check}: " in test_two_gpus.run(check)
