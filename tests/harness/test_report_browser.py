"""The report in a real browser: opened from disk, it complains about nothing, asks for nothing, and its tables work."""

from __future__ import annotations

import browser
import pytest
from curves_for_tests import whole_suite
from report_fixtures import Invented, cpu_run, gpu_run, train_cases, write_run

from harness.report import write_report

PROGRAM = browser.find()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason=f"no browser: none of {', '.join(browser.NAMES)} is on PATH"
)

READY = "document.documentElement.dataset.tables !== undefined"
FIRST_COLUMN = "[...document.querySelectorAll('{0} tbody tr')].map(r => r.cells[{1}].innerText)"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    assert PROGRAM is not None
    with browser.Browser(PROGRAM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    runs = [gpu_run(folder / "g"), cpu_run(folder / "c")]
    return write_report(runs, folder / "report.html")


@pytest.fixture
def page(chromium, report):
    chromium.emulate(1280)
    chromium.open(report.html)
    chromium.wait_for(READY)
    return chromium


def test_the_browser_sees_errors_and_requests(chromium, tmp_path):
    """The test's own control: a page that throws, logs and fetches is found out."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><meta charset=utf-8><img src='http://127.0.0.1:9/x.png'>"
        "<script>console.error('logged'); setTimeout(() => { document.title = 'thrown'; throw Error('thrown'); })</script>"
    )
    chromium.open(bad)
    chromium.wait_for("document.title == 'thrown'")
    assert any("logged" in line for line in chromium.complaints)
    assert any("thrown" in line for line in chromium.complaints)
    assert "http://127.0.0.1:9/x.png" in chromium.requests


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (420, "light")])
def test_no_complaint_and_no_request(chromium, report, width, scheme):
    chromium.emulate(width, scheme=scheme)
    chromium.open(report.html)
    chromium.wait_for(READY)
    assert chromium.complaints == []
    assert chromium.requests[0] == report.html.resolve().as_uri()
    assert all(url.startswith(("file:", "data:", "blob:")) for url in chromium.requests)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width


@pytest.fixture(scope="module")
def training_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    run = write_run(folder / "t", [*train_cases(Invented()), whole_suite()], sweep="train")
    return write_report([run], folder / "training.html")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (420, "dark")])
def test_training_runs_fit_the_page_too(chromium, training_report, width, scheme):
    """Verdict words have colours of their own, and differ in their words; captions wrap at the width of the screen."""
    chromium.emulate(width, scheme=scheme)
    chromium.open(training_report.html)
    chromium.wait_for(READY)
    assert chromium.complaints == []
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    colours = {
        word: chromium.evaluate(
            "getComputedStyle([...document.querySelectorAll('[id^=t-verdict] td')]"
            f".find(d => d.className == '{style}' && d.innerText.startsWith('{word}'))).color"
        )
        for word, style in (("PASS", "pass"), ("WARN", "warn"), ("FAIL", "bad"))
    }
    assert len(set(colours.values())) == 3
    caption = "document.querySelector('[id^=t-verdict] caption').getBoundingClientRect().width"
    assert chromium.evaluate(caption) <= width
    answers = "[...document.querySelectorAll('.answer')].map(a => a.getBoundingClientRect().top)"
    assert len(set(chromium.evaluate(answers))) == (4 if width == 420 else 1)


def test_every_table_that_should_got_its_controls(page):
    wanted = page.evaluate("document.querySelectorAll('table.sortable').length")
    assert wanted > 8
    assert page.evaluate("Number(document.documentElement.dataset.tables)") == wanted
    assert page.evaluate("document.querySelectorAll('.dt-container table.sortable').length") == wanted
    assert page.evaluate("document.querySelectorAll('.dt-search input').length") == wanted
    assert page.evaluate("document.querySelectorAll('.dt-button').length") == wanted


def test_a_click_on_a_header_sorts_by_value_not_by_text(page):
    """TFLOP/s hold thousands commas and blanks; ascending and descending are each other's reverse."""
    table = page.evaluate("document.querySelector('table[id^=t-gemm]').id")
    titles = page.evaluate(
        f"[...document.querySelectorAll('#{table} thead th')].map(h => h.innerText.trim())"
    )
    column = titles.index("TFLOP/s")
    header = f"document.querySelectorAll('#{table} thead th')[{column}]"

    def shown():
        cells = page.evaluate(FIRST_COLUMN.format(f"#{table}", column))
        return [float(cell.replace(",", "")) for cell in cells if cell]

    before = shown()
    page.evaluate(f"{header}.click()")
    page.wait_for(f"{header}.classList.contains('dt-ordering-asc')")
    ascending = shown()
    page.evaluate(f"{header}.click()")
    page.wait_for(f"{header}.classList.contains('dt-ordering-desc')")
    descending = shown()
    assert before != ascending
    assert ascending == sorted(ascending)
    assert descending == sorted(descending, reverse=True)
    assert descending[0] > 1000 > ascending[0]


def test_the_filter_leaves_what_matches(page):
    box = "document.querySelector('[id^=t-gemm][id$=_wrapper] .dt-search input')"
    page.evaluate(
        f"{box}.value = 'fp8_rowwise_fast'; {box}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )
    rows = "document.querySelectorAll('table[id^=t-gemm] tbody tr')"
    page.wait_for(f"[...{rows}].every(r => r.innerText.includes('fp8_rowwise_fast'))")
    assert page.evaluate(f"{rows}.length") == 16


def test_the_colour_scheme_follows_the_system(chromium, report):
    colours = {}
    for scheme in ("light", "dark"):
        chromium.emulate(1280, scheme=scheme)
        chromium.open(report.html)
        body = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
        label = chromium.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
        colours[scheme] = (body, label)
    assert colours["light"] == ("rgb(255, 255, 255)", "rgb(89, 96, 105)")
    assert colours["dark"] == ("rgb(20, 23, 26)", "rgb(159, 167, 176)")


def test_print_shows_all_rows_and_what_is_folded(page):
    """beforeprint and afterprint are what printing sends; a whole PDF is made as well."""
    table = page.evaluate("document.querySelector('table[id^=t-rows]').id")
    rows = f"document.querySelectorAll('#{table} tbody tr').length"
    total = f"Number(document.querySelector('#{table}_info').innerText.match(/of (\\d+) rows/)[1])"
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    every = page.evaluate(total)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = false)")
    assert page.evaluate(rows) == 25 < every
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(rows) == every
    assert page.evaluate("document.querySelectorAll('main details:not([open])').length") == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(rows) == 25
    assert page.evaluate("document.querySelectorAll('main details[open]').length") == 0
    assert page.pdf().startswith(b"%PDF-")
    assert page.complaints == []


def test_without_script_the_tables_are_whole(chromium, tmp_path):
    written = write_report([gpu_run(tmp_path)], tmp_path / "static.html", static=True)
    chromium.open(written.html)
    assert chromium.complaints == []
    assert chromium.evaluate("document.querySelectorAll('table[id^=t-rows] tbody tr').length") > 400
    assert [url.split(":")[0] for url in chromium.requests] == ["file"]
