"""The printer: what a result holds stays text in every form, and every form holds all of it.

Oracles: html.parser, markdown-it (CommonMark with GFM tables), ElementTree and json, which read the forms as their readers do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

import pytest
from hostile import HOSTILE, READER, Tags
from hypothesis import example, given
from hypothesis import strategies as st

from harness.store.printer import (
    Cell,
    JUnitCase,
    Table,
    Tone,
    as_html,
    as_markdown,
    as_text,
    cell_markdown,
    junit,
    rows_html,
    table,
)
from harness.store.text import code, markdown, printable

words = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40))


@dataclass
class Found:
    """A result."""

    said: list[str]
    shown: list[Table] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    tone: Tone = ""

    def lines(self) -> list[str]:
        return self.said

    def tables(self) -> list[Table]:
        return self.shown

    def data(self) -> dict[str, Any]:
        return self.values


def one_line(text: str) -> list[str]:
    return printable(text).split()


@given(text=words, note=words)
def test_a_cell_of_html_is_one_cell_whatever_it_holds(text: str, note: str) -> None:
    shown = table("", ["a", ">b"], [[Cell(text, text, note=note), Cell("1", 1.0)]])
    seen = Tags(f"<table>{rows_html(shown)}</table>")
    assert seen.tags == ["table", "tr", "th", *(["small"] if note else []), "td"]
    assert seen.text.replace("\r", "") == (printable(text) + printable(note) + "1").replace("\r", "")


@given(cells=st.lists(words, min_size=1, max_size=4))
@example(cells=list(HOSTILE))
@example(cells=["__0__", "a__b", "_", "*_*"])
def test_a_cell_of_markdown_is_one_cell_whatever_it_holds(cells: list[str]) -> None:
    head = "|" + " x |" * len(cells) + "\n|" + " --- |" * len(cells) + "\n"
    seen = Tags(
        READER.render(head + "|" + "".join(f" {cell_markdown(Cell(cell))} |" for cell in cells) + "\n")
    )
    assert seen.tags == ["table", "thead", "tr", *["th"] * len(cells), "tbody", "tr", *["td"] * len(cells)]
    assert seen.text.split() == [*["x"] * len(cells), *one_line(" ".join(cells))]


@given(text=words)
@example("# a")
@example("- a")
@example("1. a")
@example("---")
@example("=====")
@example("+")
def test_a_paragraph_of_markdown_stays_one_and_code_stays_code(text: str) -> None:
    """Alone, in a list and in a quotation, after a line of text that an underline would make a heading."""
    shown, line = markdown(text), " ".join(one_line(text))
    for before, tags in (("", ["p"]), ("- ", ["ul", "li"]), ("> ", ["blockquote", "p"])):
        seen = Tags(READER.render(f"{before}{shown}\n"))
        assert not shown or (seen.tags, seen.text.split()) == (tags, one_line(text))
    assert Tags(READER.render(f"words\n{shown}\n")).tags == ["p"]
    assert Tags(READER.render(f"run {code(text)} now")).tags == (["p", "code"] if line else ["p"])


def test_a_command_in_a_cell_keeps_its_brackets() -> None:
    cell = Cell("python -m harness 'cases=[a,b]'\nls | wc", style="command")
    assert cell_markdown(cell) == "`python -m harness 'cases=[a,b]'`<br>`ls \\| wc`"


@given(text=words, more=words)
def test_text_has_a_line_a_line_and_a_row_a_row(text: str, more: str) -> None:
    found = Found([f"x{text}", f"y{more}"], [table(f"z{text}", ["a", ">b"], [[f"q{more}", "1"], ["w", "2"]])])
    seen = as_text(found).splitlines()
    assert all(line.isprintable() for line in seen)
    assert [line[:1] for line in seen if line.strip()] == [*"xyz", "a", "─", "q", "w"]
    assert as_text(Found(["x"], [table("empty", ["a"], [])])) == "x\n"


@pytest.mark.parametrize("bad", HOSTILE)
def test_the_forms_hold_lines_and_tables_alike(bad: str) -> None:
    found = Found(["FP8: on", bad], [table("where", ["a", ">b"], [[bad, "1"]])])
    kinds = ["h2", "ul", "li", "p", "table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]
    seen = Tags(READER.render(as_markdown(found)))
    assert seen.tags == kinds
    page = Tags(as_html(found))
    assert page.tags == [
        *("p", "strong", "ul", "li", "table", "caption"),
        *("thead", "tr", "th", "th", "tbody", "tr", "th", "td"),
    ]
    assert page.names <= {"class", "id", "scope", "data-order"}
    assert one_line(seen.text) == one_line(" ".join(["FP8: on", bad, "where a b", bad, "1"]))


@given(name=words, message=words)
def test_junit_counts_what_it_holds(name: str, message: str) -> None:
    tests = [
        JUnitCase("g", name),
        JUnitCase("g", "b", "failure", message, "k"),
        JUnitCase("g", "c", "skipped", message),
    ]
    tests += [JUnitCase("g", "d", "error", message), JUnitCase("g", "e", "system-out", message)]
    (suite,) = ElementTree.fromstring(junit("gate", tests))
    assert {k: suite.get(k) for k in ("failures", "errors", "skipped", "tests")} == {
        "failures": "1",
        "errors": "1",
        "skipped": "1",
        "tests": "5",
    }
    assert [[child.tag for child in case] for case in suite] == [
        *([], ["failure"], ["skipped"], ["error"], ["system-out"])
    ]
