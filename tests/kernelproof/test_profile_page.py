"""Proves that the profile's page works in a real browser, from a file and without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproof import profile
from tests import browser
from tests.browser import open_page, scroll_to
from tests.kernelproof.profiled import HOSTILE, LINES, PROFILE


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Page]:
    """A browser's tab for all tests of this module."""
    with browser.page() as page:
        yield page


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a profile."""
    file = tmp_path_factory.mktemp("profile") / "profile.html"
    file.write_text(profile.html(PROFILE))
    return file


def test_the_page_opens_without_faults_and_without_requests(tab: browser.Page, path: Path) -> None:
    open_page(tab, path)
    assert tab.faults == []
    assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
    assert not tab.run("document.documentElement.scrollWidth > innerWidth"), "nothing sticks out sideways"
    assert tab.run("document.querySelectorAll('.code tbody tr').length") == len(LINES)
    assert tab.run("document.querySelectorAll('.timeline [data-lane]').length") == 4
    assert "nothing is measured" in tab.run("document.body.innerText")
    assert tab.run("document.querySelector('#line-1 .cuda').textContent") == f"kernel.cu:8 {HOSTILE}"
    assert tab.run("document.scripts.length") == 2


def test_bars_are_as_long_as_the_stalls(tab: browser.Page, path: Path) -> None:
    """13 cycles, the longest wait, fill the cell: 12 and 1 thirteenths."""
    open_page(tab, path)
    widths = tab.run("[...document.querySelectorAll('#line-1 .bar span')].map(e => e.getBoundingClientRect().width)")
    cell = tab.run("document.querySelector('#line-1 .bar div').getBoundingClientRect().width")
    assert [round(width / cell, 2) for width in widths] == [round(12 / 13, 2), round(1 / 13, 2)]
    assert tab.run("document.querySelector('#line-0 .bar span').getBoundingClientRect().width") == pytest.approx(
        cell * 2 / 13, abs=1
    )


def test_pointing_at_a_lane_names_the_instruction_and_a_click_leads_to_its_row(tab: browser.Page, path: Path) -> None:
    open_page(tab, path)
    assert tab.run("document.getElementById('tip').hidden")
    _, y = scroll_to(tab, "[data-lane='warp 0']")
    left = tab.run("document.querySelector('.timeline svg').getBoundingClientRect().x")
    tab.point(left + 92 + 8 * 5, y)  # cycle 5: warp 0 waits for its HMMA of cycle 10
    words = tab.run("document.getElementById('tip').innerText")
    assert LINES[1].sass in words
    assert "cycle 10; on average 13.0 cycles: short_scoreboard 12.0, wait 1.0" in words
    tab.point(left + 92 + 8 * 5, y, click=True)
    assert tab.run("location.hash") == "#line-1"
    tab.point(1, 1)
    assert tab.run("document.getElementById('tip').hidden")


@pytest.mark.slow
def test_it_holds_on_a_phone_and_in_the_dark(tab: browser.Page, path: Path) -> None:
    open_page(tab, path)
    light = tab.run("getComputedStyle(document.querySelector('.s-selected')).fill")
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert tab.run("getComputedStyle(document.querySelector('.s-selected')).fill") != light
    tab.call("Emulation.setEmulatedMedia", media="")
    tab.call("Emulation.setDeviceMetricsOverride", width=375, height=800, deviceScaleFactor=1, mobile=True)
    open_page(tab, path)
    assert tab.run("document.documentElement.scrollWidth") == 375, "only tables and the picture scroll sideways"
    heights = tab.run("[...document.querySelectorAll('.timeline text')].map(e => e.getBoundingClientRect().height)")
    assert min(heights) >= 10
    assert tab.run("[...document.querySelectorAll('.scroll')].some(e => e.scrollWidth > e.clientWidth)")
    tab.call("Emulation.clearDeviceMetricsOverride")
