"""A browser for the page, and the quickstart's runs, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_chromium
from synthetic import make_quickstart


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip("no Chromium: tools/setup/system.sh installs it as root on Debian")
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_quickstart(tmp_path_factory.mktemp("runs"))
