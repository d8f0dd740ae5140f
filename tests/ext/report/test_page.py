"""The page in a real browser: it draws, it asks the network for nothing, its controls work, it fits a phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Browser

from megatron_ext.report import html
from megatron_ext.report.view import load_views


@pytest.fixture(scope="module")
def page(quickstart, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("page") / "report.html"
    html.write(load_views(quickstart), target)
    return target


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.requests.clear()
    browser.errors.clear()
    browser.look(1280, 900)
    browser.open(page)
    browser.draw_all()
    return browser


def test_every_chart_is_drawn_without_errors_or_network(opened: Browser, page: Path) -> None:
    assert opened.value("document.querySelectorAll('.chart').length") >= 4
    # A Bokeh figure's canvas lives in shadow roots; drawn means that it has the width of its column.
    width = "chart.firstElementChild?.getBoundingClientRect().width"
    assert opened.value(f"[...document.querySelectorAll('.chart')].every((chart) => {width} > 300)")
    assert opened.errors == []
    assert set(opened.requests) == {page.as_uri()}


def _colour(browser: Browser, chart: int) -> str:
    """Return the colour of a chart's top left pixel: its border."""
    return browser.value(f"""(() => {{
        const find = (node) => {{
            for (const child of node.querySelectorAll('*')) {{
                if (child.tagName === 'CANVAS' && child.width > 100) return child
                const inner = child.shadowRoot && find(child.shadowRoot)
                if (inner) return inner
            }}
        }}
        const canvas = find(document.querySelectorAll('.chart')[{chart}])
        return String(canvas.getContext('2d').getImageData(2, 2, 1, 1).data)
    }})()""")


def test_charts_follow_a_change_to_dark(opened: Browser) -> None:
    light = _colour(opened, 0)
    opened.look(1280, 900, dark=True)
    opened.value("new Promise((done) => setTimeout(done, 500))")
    assert light == "255,255,255,255"
    assert _colour(opened, 0) == "20,23,26,255"


@pytest.mark.parametrize("dark", [False, True])
def test_phone_needs_no_sideways_scrolling(browser: Browser, page: Path, dark: bool) -> None:
    browser.look(390, 844, phone=True, dark=dark)
    browser.open(page)
    browser.draw_all()
    assert browser.value("document.documentElement.scrollWidth") == 390


VIEWS = "Object.values(Bokeh.index.roots ?? Bokeh.index).map((view) => view.model)"


def _image(browser: Browser) -> list[int]:
    """Return the codes that the expert map shows, row by row."""
    source = "renderers?.[0]?.data_source"
    return browser.value(f"Array.from({VIEWS}.find((plot) => plot.{source}?.name === 'frames').{source}.data.image[0])")


def test_slider_shows_the_frame_it_names(opened: Browser) -> None:
    last = _image(opened)
    opened.value("document.querySelector('.slider input').value = 0")
    opened.value("document.querySelector('.slider input').dispatchEvent(new Event('input'))")
    first = _image(opened)
    assert opened.value("document.querySelector('.slider output').textContent") == "step 1"
    assert len(first) == len(last) == 4 * 8
    assert first != last
    assert first[1 * 8 + 3] == 0, "the dead expert of the made-up run: layer 1, expert 3"


def test_switches_hide_a_run_and_turn_the_axis(opened: Browser) -> None:
    plot = f"{VIEWS}.find((plot) => plot.tags.includes('x-axis'))"
    opened.value("document.querySelector('input[data-run=dense]').click()")
    assert opened.value(f"{plot}.renderers.filter((r) => r.name === 'dense').every((r) => !r.visible)")
    assert opened.value(f"{plot}.renderers.filter((r) => r.name === 'moe').every((r) => r.visible)")
    opened.value("document.querySelector('input[name=axis][value=step]').click()")
    assert opened.value(f"{plot}.renderers[0].glyph.x.field") == "step"
    assert opened.value(f"{plot}.below[0].axis_label") == "step"
    assert opened.errors == []
