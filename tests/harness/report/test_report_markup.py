"""Markup of the report: nothing that a row holds may become markup, a cell or a direction of its own.

Oracles: html.parser and markdown-it (CommonMark with GFM tables), which read the pages as a browser and a forge would.
"""

from __future__ import annotations

import base64
import gzip
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from harness.report.markup import SHOWN, cell_markdown, pack, rows_html, sort_key
from harness.report.table import Cell, Column, Table, number
from harness.store.text import code, markdown, printable

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a|b",
    "[click](javascript:alert(1))",
    "![x](http://127.0.0.1/x.png)",
    "**bold** _it_ `code` ~~gone~~",
    "line\nbreak\r\n# heading",
    "\u202egnirts\u2066",
    "&lt;b&gt; &amp;",
    "=HYPERLINK(1)",
    "$\\frac{1}{2}$",
    "\\|",
)
words = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40))


class Tags(HTMLParser):
    """The elements of some HTML, and the text of it."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@given(text=words, note=words)
def test_a_cell_of_html_is_one_cell_whatever_it_holds(text: str, note: str) -> None:
    table = Table(
        "t", (Column("a"), Column("b", numeric=True)), ((Cell(text, text, note=note), Cell("1", 1.0)),)
    )
    seen = Tags(f"<table>{rows_html(table)}</table>")
    assert seen.tags == ["table", "tr", "th", *(["small"] if note else []), "td"]
    assert seen.text.replace("\r", "") == (printable(text) + printable(note) + "1").replace("\r", "")


@given(cells=st.lists(words, min_size=1, max_size=4))
@example(cells=list(HOSTILE))
@example(cells=["__0__", "a__b", "_", "*_*"])
def test_a_cell_of_markdown_is_one_cell_whatever_it_holds(cells: list[str]) -> None:
    head = "|" + " x |" * len(cells) + "\n|" + " --- |" * len(cells) + "\n"
    row = "|" + "".join(f" {cell_markdown(Cell(cell))} |" for cell in cells) + "\n"
    seen = Tags(MarkdownIt("commonmark").enable("table").enable("strikethrough").render(head + row))
    assert seen.tags == ["table", "thead", "tr", *["th"] * len(cells), "tbody", "tr", *["td"] * len(cells)]
    shown = seen.text.split()
    assert shown == [*["x"] * len(cells), *" ".join(printable(c) for c in cells).split()]


@given(text=words)
@example("# a")
@example("- a")
@example("1. a")
@example("---")
@example("=====")
@example("+")
def test_a_paragraph_of_markdown_stays_one(text: str) -> None:
    """Alone, in a list and in a quotation, after a line of text that an underline would make a heading."""
    shown = markdown(text)
    reader = MarkdownIt("commonmark").enable("table").enable("strikethrough")
    for before, tags in (("", ["p"]), ("- ", ["ul", "li"]), ("> ", ["blockquote", "p"])):
        seen = Tags(reader.render(f"{before}{shown}\n"))
        if shown:
            assert seen.tags == tags
            assert seen.text.split() == printable(text).split()
    assert Tags(reader.render(f"words\n{shown}\n")).tags == ["p"]


@given(text=words)
def test_code_stays_code(text: str) -> None:
    line = " ".join(printable(text).split())
    seen = Tags(MarkdownIt("commonmark").render(f"run {code(text)} now"))
    assert seen.tags == (["p", "code"] if line else ["p"])
    assert " ".join(seen.text.split()) == " ".join(f"run {line} now".split()) or not line


def test_a_command_in_a_cell_keeps_its_brackets() -> None:
    cell = Cell("python -m harness 'cases=[a,b]'\nls | wc", style="command")
    assert cell_markdown(cell) == "`python -m harness 'cases=[a,b]'`<br>`ls \\| wc`"


@pytest.mark.parametrize(
    ("value", "key"), [(1.5, "1.5"), (float("inf"), "1e+308"), (float("nan"), ""), ("b", "b"), (3, "3")]
)
def test_sort_keys_are_numbers_of_javascript(value: object, key: str) -> None:
    assert sort_key(value) == key


@given(text=st.text(max_size=200))
def test_what_is_packed_comes_back(text: str) -> None:
    text = text.encode(errors="ignore").decode()
    assert gzip.decompress(base64.b64decode(pack(text))).decode() == text
    assert pack(text) == pack(text)


def test_rows_come_in_order_and_in_parts() -> None:
    rows = tuple((Cell(str(i), i),) for i in range(SHOWN + 5))
    table = Table("t", (number("n"),), rows)
    assert rows_html(table, 0, SHOWN).count("<tr>") == SHOWN
    assert rows_html(table, SHOWN).count("<tr>") == 5
    assert f"{rows_html(table, 0, SHOWN)}\n{rows_html(table, SHOWN)}" == rows_html(table)
