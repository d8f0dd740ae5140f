"""The page of symptoms: its tables are those of names.py, and each alarm's link lands."""

from __future__ import annotations

import pytest

from megatron_ext.observe import names


@pytest.fixture(scope="module")
def page(root) -> str:
    return (root / names.SYMPTOMS_PAGE).read_text()


@pytest.mark.parametrize(("kind", "table"), [("metrics", names.markdown_table()), ("alarms", names.alarm_table())])
def test_tables_are_current(page, kind, table):
    _, rest = page.split(f"<!-- {kind}: generated from names.py -->\n")
    assert rest.split("<!-- end -->")[0] == table


@pytest.mark.parametrize("alarm", names.ALARMS.values(), ids=lambda alarm: alarm.name)
def test_each_alarm_has_its_entry(page, alarm):
    assert page.count(f"\n### {alarm.anchor}\n") == 1
    assert alarm.link == f"docs/symptoms.md#{alarm.anchor}"
