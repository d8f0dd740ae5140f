"""Each test's seconds, what it printed and a failure's text as soon as it ends.

Time on a lent GPU may end before pytest's summary. `run.sh` runs them side by side on one card.
"""

from __future__ import annotations

import pytest

_config: pytest.Config | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _config
    _config = config


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    reporter = _config.pluginmanager.get_plugin("terminalreporter") if _config else None
    if reporter is None or (report.when != "call" and not report.failed):
        return
    text = f"\n{report.outcome} {report.nodeid.rpartition('/')[2]} ({report.when}, {report.duration:.0f} s)\n"
    text += "" if report.failed else report.capstdout
    reporter.write(text + (f"{report.longreprtext[-4000:]}\n" if report.failed else ""))
