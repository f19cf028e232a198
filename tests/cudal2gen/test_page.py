"""Proves the report's page in a real browser, opened as a file and without a network."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from cudal2gen import report
from cudal2gen.generation import catalog
from cudal2gen.results import KERNEL, Measurements
from tests import browser
from tests.browser import open_page, scroll_to
from tests.cudal2gen.measured import H200, campaign, measurement, timing
from tests.cudal2gen.reporting import EMPTY, HOSTILE

# Problems of the report, and a script that counts the marks in its first chart.
SHAPES = 120
VISIBLE = "document.querySelectorAll('#measured-1 [data-chart=\"0\"] .point').length"


@pytest.fixture(scope="module")
def tab() -> Iterator[browser.Page]:
    """A browser's tab for all tests of this module."""
    with browser.page() as page:
        yield page


@pytest.fixture(scope="module")
def measured_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a report on invented measurements of an A100."""
    names = {
        (record.m, record.n, record.k): record.name
        for record in catalog.load()
        if (record.gpu, record.acc) == ("a100", "f16")
    }
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report.report(campaign(SHAPES, names=names.get), catalog.load()).html())
    return path


def uncovered_mark(tab: browser.Page, chart: int) -> int:
    """The number of a shape whose mark is not covered by another one."""
    index = tab.run(
        f"(() => {{ const host = document.querySelector('[data-chart=\"{chart}\"]');"
        "host.scrollIntoView({block: 'center'});"
        "const free = [...host.querySelectorAll('.point')].find(node => { const b = node.getBoundingClientRect();"
        "return document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2) === node; });"
        "return +free.dataset.shape; })()"
    )
    return int(index)


@pytest.mark.slow
def test_the_page_opens_without_faults_and_without_requests(tab: browser.Page, measured_page: Path) -> None:
    open_page(tab, measured_page)
    assert tab.faults == []
    assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
    assert tab.requests.count(measured_page.as_uri()) == 1
    assert tab.run("document.querySelectorAll('.chart').length") == 4 * 4 + 7
    assert tab.run("[...document.querySelectorAll('.chart')].every(host => host.querySelector('svg'))")
    assert tab.run("[...document.querySelectorAll('.chart')].every(host => host.getAttribute('aria-label'))")
    assert not tab.run("document.documentElement.scrollWidth > innerWidth"), "nothing sticks out sideways"
    assert "NaN" not in tab.run("document.querySelector('main').innerHTML")


def test_a_fault_and_a_request_are_noticed(tab: browser.Page, tmp_path: Path) -> None:
    """The test above relies on this."""
    path = tmp_path / "bad.html"
    path.write_text("<script>console.error('seen'); undefined.x</script><img src='http://localhost:9/x.png'>")
    open_page(tab, path)
    words = " ".join(tab.faults)
    assert "seen" in words
    assert "exception" in words
    assert "request failed: net::ERR_INTERNET_DISCONNECTED" in words
    assert "http://localhost:9/x.png" in tab.requests


@pytest.mark.slow
def test_size_classes_filter_the_points(tab: browser.Page, measured_page: Path) -> None:
    open_page(tab, measured_page)
    before = tab.run(VISIBLE)
    assert before == SHAPES
    large = tab.run("document.querySelectorAll('#measured-1 [data-chart=\"0\"] .point.c4').length")
    assert 0 < large < SHAPES
    tab.point(*scroll_to(tab, "input[name=class][value='4']"), click=True)
    assert tab.run(VISIBLE) == SHAPES - large
    caption = tab.run("document.querySelector('#measured-1 .figure').textContent")
    assert caption.startswith(f"{SHAPES - large} of {SHAPES} shapes, geomean ")
    tab.point(*scroll_to(tab, "input[name=class][value='4']"), click=True)
    assert tab.run(VISIBLE) == SHAPES


@pytest.mark.slow
def test_the_caption_agrees_with_the_table(tab: browser.Page, measured_page: Path) -> None:
    """For every baseline the script's geometric mean of rounded numbers equals Table 1's."""
    open_page(tab, measured_page)
    rows = tab.run(
        "[...[...document.querySelectorAll('#measured-1 table')].find(t => t.caption.textContent.startsWith('Table 1'))"
        ".tBodies[0].rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert len(rows) == 10
    for name, shapes, _, _, _, geomean, *_ in rows:
        tab.run(f"(s => {{ s.value = {name!r}; s.dispatchEvent(new Event('change', {{bubbles: true}})); }})(baseline)")
        caption = tab.run("document.querySelector('#measured-1 .figure').textContent")
        assert caption.startswith(f"{shapes} of {shapes} shapes, geomean {geomean.split(' ')[0]}"), name


@pytest.mark.slow
def test_hover_shows_the_shape_and_the_times(tab: browser.Page, measured_page: Path) -> None:
    open_page(tab, measured_page)
    assert tab.run("document.getElementById('tip').hidden")
    index = uncovered_mark(tab, 0)
    m, n, k, kind, record, times, *_ = tab.run(f"JSON.parse(data.textContent).groups['measured-1'].shapes[{index}]")
    tab.point(*scroll_to(tab, f"[data-chart='0'] .point[data-shape='{index}']"))
    words = tab.run("document.getElementById('tip').innerText")
    assert " \N{MULTIPLICATION SIGN} ".join(map(str, (m, n, k))) in words
    assert tab.run(f"JSON.parse(data.textContent).classes[{kind}]") in words
    assert tab.run(f"JSON.parse(data.textContent).records[{record}].name") in words
    assert f"{float(f'{times[0]:.4g}'):g} µs" in words
    assert "cublaslt-autotuning-max" in words
    tab.point(1, 1)
    assert tab.run("document.getElementById('tip').hidden")


def test_hover_counts_the_records_of_a_disc(tab: browser.Page, measured_page: Path) -> None:
    open_page(tab, measured_page)
    tab.point(*scroll_to(tab, "#choices .disc"))
    assert "records" in tab.run("document.getElementById('tip').innerText")


@pytest.mark.slow
def test_a_click_and_a_link_show_the_record(tab: browser.Page, measured_page: Path) -> None:
    open_page(tab, measured_page)
    index = uncovered_mark(tab, 0)
    record = tab.run(f"JSON.parse(data.textContent).groups['measured-1'].shapes[{index}][4]")
    tab.point(*scroll_to(tab, f"[data-chart='0'] .point[data-shape='{index}']"), click=True)
    assert tab.run("document.getElementById('record').open")
    record_text = tab.run("JSON.parse(document.getElementById('record-text').textContent)")
    assert record_text == tab.run(f"JSON.parse(data.textContent).records[{record}].record")
    assert record_text["family"].startswith("sm80_")
    tab.point(*scroll_to(tab, "dialog button"), click=True)
    assert not tab.run("document.getElementById('record').open")
    assert tab.run("location.hash") == ""
    name = tab.run("document.querySelector('#measured-1 td a').textContent")
    tab.run("document.querySelector('#measured-1 td a').click()")
    tab.settle()
    assert tab.run("document.getElementById('record').open")
    words = tab.run("document.getElementById('record-name').textContent")
    problem = tab.run("document.querySelector('#measured-1 td a').closest('tr').cells[0].textContent")
    assert words == f"{name}, binary {'0' * 16}; in the catalog for a100 f16 tn {problem}"
    assert tab.faults == []


def test_every_shape_is_there_as_a_table(tab: browser.Page, measured_page: Path) -> None:
    open_page(tab, measured_page)
    tab.run("document.querySelector('details.all summary').click()")
    tab.settle()
    assert tab.run("document.querySelectorAll('details.all[open] tbody tr').length") == SHAPES
    assert tab.run("document.querySelectorAll('details.all[open] tbody a').length") == SHAPES


def test_with_nothing_measured_the_page_still_works(tab: browser.Page, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    path.write_text(report.report(EMPTY, catalog.load()).html())
    open_page(tab, path)
    assert tab.faults == []
    assert tab.run("document.querySelectorAll('.chart svg').length") == 7
    assert "No timing is in this report" in tab.run("document.body.innerText")


@pytest.mark.slow
def test_hostile_names_stay_text(tab: browser.Page, tmp_path: Path) -> None:
    hostile = measurement(
        (64, 64, 64),
        [timing(KERNEL, [1.0], record=HOSTILE, digest=HOSTILE), timing(HOSTILE, [2.0]), timing("torch.matmul", [2.0])],
    )
    card = H200.model_copy(update={"name": HOSTILE, "driver": HOSTILE})
    path = tmp_path / "hostile.html"
    path.write_text(report.report(Measurements({card.id: card}, [hostile]), []).html())
    open_page(tab, path)
    tab.run("document.querySelector('details.all summary').click()")
    tab.point(*scroll_to(tab, "[data-chart='0'] .point"), click=True)
    assert HOSTILE.split()[0] in tab.run("document.getElementById('record-name').textContent")
    assert tab.run("document.images.length + document.scripts.length") == 2
    assert tab.faults == []


@pytest.mark.slow
def test_dark_and_print_are_readable(tab: browser.Page, measured_page: Path) -> None:
    open_page(tab, measured_page)
    light = tab.run("getComputedStyle(document.body).backgroundColor")
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert tab.run("getComputedStyle(document.body).backgroundColor") != light
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.run("getComputedStyle(baseline.parentElement).display") == "none"
    assert tab.run("document.querySelector('.chip').innerText") == "small-m", "the legend stays"
    tab.call("Emulation.setDeviceMetricsOverride", width=720, height=1000, deviceScaleFactor=1, mobile=False)
    assert not tab.run("document.documentElement.scrollWidth > innerWidth"), "it fits on a page"
    tab.call("Emulation.clearDeviceMetricsOverride")
    tab.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.slow
def test_on_a_phone_captions_stay_in_sight_and_the_text_of_charts_is_legible(
    tab: browser.Page, measured_page: Path
) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=375, height=800, deviceScaleFactor=1, mobile=True)
    open_page(tab, measured_page)
    assert tab.run("document.documentElement.scrollWidth") == 375, "nothing but tables scrolls sideways"
    captions = tab.run("[...document.querySelectorAll('caption span')].map(e => e.getBoundingClientRect().right)")
    assert len(captions) > 10
    assert max(captions) <= 375
    wide = (
        "[...document.querySelectorAll('.scroll')]"
        ".filter(e => e.scrollWidth > e.clientWidth && e.querySelector('caption'))"
    )
    assert tab.run(f"{wide}.length") > 3
    moved = tab.run(
        f"{wide}.map(e => {{ e.scrollLeft = 200; "
        "return e.querySelector('caption span').getBoundingClientRect().left; })"
    )
    assert min(moved) >= 0, "captions stay while a table scrolls"
    heights = tab.run("[...document.querySelectorAll('.chart svg text')].map(e => e.getBoundingClientRect().height)")
    assert min(heights) >= 10
    labels = tab.run(
        "[...document.querySelectorAll('.chart svg')].map(svg => [...svg.querySelectorAll('text[text-anchor=middle]')]"
        ".filter(e => !e.getAttribute('transform')).map(e => e.getBoundingClientRect())"
        ".map(box => [box.left, box.right, box.top]))"
    )
    for boxes in labels:
        ticks = [box for box in boxes if box[2] == boxes[0][2]]
        assert all(left[1] <= right[0] for left, right in pairwise(ticks)), ticks
    tab.call("Emulation.clearDeviceMetricsOverride")
