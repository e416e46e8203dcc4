"""The report in a real browser: opened from disk, it complains about nothing, asks for nothing, and its tables work."""

from __future__ import annotations

import csv
import io
import re

import browser
import pytest
from report_fixtures import Invented, absent, figure, write_run

from harness.report import write_report
from harness.store.case import Case

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


@pytest.fixture
def page(chromium, whole):
    chromium.emulate(1400)
    chromium.open(whole.html)
    chromium.wait_for(READY)
    chromium.evaluate("document.querySelectorAll('details.long').forEach(d => d.open = true)")
    return chromium


def test_the_browser_sees_errors_and_requests(chromium, tmp_path):
    """The test's own control: a page that throws, logs and fetches is found out."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><meta charset=utf-8><body style='background:#fff'><p style='color:#999'>pale</p><p>dark</p><img src='http://127.0.0.1:9/x.png'>"
        "<script>console.error('logged'); setTimeout(() => { document.title = 'thrown'; throw Error('thrown'); })</script>"
    )
    chromium.emulate(1400)
    chromium.open(bad)
    chromium.wait_for("document.title == 'thrown'")
    assert list(chromium.evaluate(CONTRAST).values()) == [pytest.approx(2.85, abs=0.01)], (
        "the pale paragraph alone"
    )
    assert any("logged" in line for line in chromium.complaints)
    assert any("thrown" in line for line in chromium.complaints)
    assert "http://127.0.0.1:9/x.png" in chromium.requests


SCREENS = [(1400, "light"), (1400, "dark"), (400, "light"), (400, "dark")]
# Every visible text with its colour, and the colour behind it; what is disabled is exempt (WCAG 2.1, 1.4.3).
CONTRAST = """
(() => {
  const parts = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = (c) => { const [r, g, b] = parts(c).map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (c !== 'rgba(0, 0, 0, 0)') return c; } return 'rgb(255, 255, 255)'; };
  const worst = {};
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !e.checkVisibility() || e.closest('.disabled, script, style')) continue;
    const style = getComputedStyle(e), size = parseFloat(style.fontSize), svg = e.closest('svg') !== null;
    const [a, b] = [light(svg ? style.fill : style.color), light(behind(e))].sort((x, y) => y - x);
    const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < least) worst[e.outerHTML.slice(0, 120)] = ratio;
  }
  return worst;
})()
"""


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_a_page_of_everything_on_every_screen(chromium, whole, width, scheme):
    """No complaint, no request, nothing wider than the screen, every text readable (AA, measured on the elements)."""
    chromium.emulate(width, scheme=scheme)
    chromium.open(whole.html)
    chromium.wait_for(READY)
    chromium.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert chromium.complaints == []
    assert chromium.requests[0] == whole.html.resolve().as_uri()
    assert all(url.startswith(("file:", "data:", "blob:")) for url in chromium.requests)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate(CONTRAST) == {}
    top = "document.querySelector('.headline').getBoundingClientRect().top + scrollY"
    assert chromium.evaluate(top) < 900


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
    page.click(header)
    page.wait_for(f"{header}.classList.contains('dt-ordering-asc')")
    ascending = shown()
    page.click(header)
    page.wait_for(f"{header}.classList.contains('dt-ordering-desc')")
    descending = shown()
    assert before != ascending
    assert ascending == sorted(ascending)
    assert descending == sorted(descending, reverse=True)
    assert descending[0] > 1000 > ascending[0]


def _csv(page, table):
    """What a click on the CSV button of a table saves, as rows."""
    page.evaluate(
        "window.saved = null; const make = URL.createObjectURL; URL.createObjectURL = (b) => ((window.saved = b), make(b)); 0"
    )
    page.click(f"document.querySelector('{table}_wrapper .dt-button')")
    page.wait_for("window.saved !== null")
    mark = "window.saved.arrayBuffer().then((b) => [...new Uint8Array(b).slice(0, 3)])"
    assert page.evaluate(mark) == [0xEF, 0xBB, 0xBF]  # by which spreadsheets know UTF-8
    return list(csv.reader(io.StringIO(page.evaluate("window.saved.text()"))))


def test_csv_holds_the_filtered_rows_with_their_intervals(page):
    table = "#" + page.evaluate("document.querySelector('table[id^=t-gemm]').id")
    page.click(f"document.querySelector('{table}_wrapper .dt-search input')")
    page.write("rowwise_fast_eager")
    page.wait_for(f"document.querySelectorAll('{table} tbody tr').length == 16")
    head, *rows = _csv(page, table)
    assert len(rows) == 16
    assert {len(row) for row in rows} == {len(head)}
    at = head.index("speedup, note")
    assert head[at - 1] == "speedup"
    formed = [row for row in rows if row[at - 1]]
    assert all(re.fullmatch(r"\d\.\d+x", row[at - 1]) and " to " in row[at] for row in formed)
    assert len(formed) == 15


def test_csv_holds_no_formula(chromium, tmp_path):
    """A spreadsheet runs what starts with = + - @; such a name is led by an apostrophe, a number is left alone."""
    names = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", 'a,"b"\nc', "plain"]
    case = Case.of("gemm", {"M": 16})
    rows = Invented().times(case, {"bf16": {"ms": 1.0}})
    rows += [absent(case, name, "failed", name, "bf16") for name in names]
    rows.append(figure(case, "bf16", "rel_err_max", -0.25))
    written = write_report([write_run(tmp_path, [rows])], tmp_path / "r.html")
    chromium.emulate(1400)
    chromium.open(written.html)
    chromium.wait_for(READY)
    chromium.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    table = "#" + chromium.evaluate("document.querySelector('table[id^=t-rows]').id")
    cells = {cell for row in _csv(chromium, table) for cell in row}
    assert {"'=1+1", "'+cmd|' /C calc'!A0", "'-2+3", "'@SUM(A1)", "plain", "-0.2500"} <= cells
    assert not [c for c in cells if c[:1] in "=+@" and c]


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (400, 800)])
def test_the_sentence_stands_on_the_first_screen(chromium, gpu, width, height):
    chromium.emulate(width, height)
    chromium.open(gpu[1].html)
    bottoms = "[...document.querySelectorAll('.lead')].map(e => e.getBoundingClientRect().bottom)"
    assert 0 < max(chromium.evaluate(bottoms)) <= height


def test_print_shows_all_rows_and_what_is_folded(page):
    """beforeprint and afterprint are what printing sends."""
    rows = "document.querySelectorAll('table[id^=t-rows] tbody tr').length"
    folded = "document.querySelectorAll('main details:not([open])').length"
    before = page.evaluate(rows), page.evaluate(folded)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(rows) > before[0] == 2 * 25, "of two machines"
    assert page.evaluate(folded) == 0 < before[1]
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert (page.evaluate(rows), page.evaluate(folded)) == before
