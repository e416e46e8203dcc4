"""Answers to public questions. Oracles: the figures that the askers published, in the CSV; the page, recomputed."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from asked_in_public import PAGE, answered, ask, rows, unasked
from documented_table import documented

NUMBER = re.compile(r"\d+\.\d+")
ASKED = [row for row in rows() if row["words"]]


def _line(key: str) -> str:
    (line,) = (line for line in documented(PAGE, "answered") if f"[{key}](" in line)
    return line


def _published(row: dict[str, str]) -> tuple[float, float]:
    """The least and the most gain that the published figures allow: every corner of their rounding."""
    by = float(row["rounding"])
    corners = [(float(row["bf16"]) + x) / (float(row["fp8"]) + y) for x in (-by, by) for y in (-by, by)]
    gains = corners if row["unit"] in ("s", "ms") else [1 / corner for corner in corners]
    return min(gains), max(gains)


def test_page_and_file_hold_the_same_rows() -> None:
    assert [line.split("](")[0] for line in documented(PAGE, "answered")[2:]] == [
        f"| [{r['key']}" for r in ASKED
    ]
    assert documented(PAGE, "unasked") == unasked()
    assert len({row["key"] for row in rows()}) == len(rows())
    for row, line in zip(ASKED, documented(PAGE, "answered")[2:], strict=True):
        assert all(row[name] in line for name in ("source", "question", "measured", "why"))


@pytest.mark.parametrize("key", ["torchtitan issue 1207", "TransformerEngine issue 445"])
def test_a_row_recomputed(key: str) -> None:
    """Words exactly, figures to 2 % or 0.01: another torch may trace a norm as more or fewer operators."""
    (row,) = (row for row in ASKED if row["key"] == key)
    (due,) = answered([ask(row)])[2:]
    line = _line(key)
    assert NUMBER.sub("#", line) == NUMBER.sub("#", due)
    for shown, true in zip(NUMBER.findall(line), NUMBER.findall(due), strict=True):
        assert float(shown) == pytest.approx(float(true), rel=0.02, abs=0.011)


def test_what_must_not_be_said_follows_from_the_gain() -> None:
    """By the page's rule, from the published figures alone: "on" needs 2 %, "off" needs less."""
    for row in ASKED:
        gain = float(row["bf16"]) / float(row["fp8"])
        gain = gain if row["unit"] in ("s", "ms") else 1 / gain
        assert row["must_not_say"] == ("off" if gain >= 1.02 else "on|only these layers"), row["key"]
        assert f"| {gain:.3f}" in _line(row["key"])


def test_the_agreement_shown_follows_from_the_figures_shown() -> None:
    """Each line judged again from what it shows; the summary counts them; no disagreement is left without a word on why."""
    words = figures = both = 0
    for row in ASKED:
        *_, said, everything, agrees = (cell.strip() for cell in _line(row["key"]).strip("| ").split(" | "))
        decision = said.split(",")[0]
        word = decision not in row["must_not_say"].split("|")
        ranges = [tuple(map(float, NUMBER.findall(cell)[1:])) for cell in (said, everything)]
        least, most = _published(row)
        # Half a unit of the last digit shown.
        inside = any(low < high and low - 0.005 <= most and least <= high + 0.005 for low, high in ranges)
        texts = {(1, 1): "yes", (1, 0): "word yes, figure no", (0, 1): "figure yes, word no", (0, 0): "no"}
        shown = texts[word, inside]
        assert agrees.split(":")[0] == shown, row["key"]
        assert shown == "yes" or row["why"]
        words, figures, both = words + word, figures + inside, both + (word and inside)
    summary = f"Of {len(ASKED)}, {both} agree in both, {words} in the word, {figures} in the figure."
    assert summary in PAGE.read_text()


def test_sources_are_links_with_a_date() -> None:
    assert len(ASKED) >= 10
    for row in rows():
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", row["source"])
        assert re.fullmatch(r"20\d\d-\d\d", row["date"])
        assert row["words"] or row["why"]
    assert all(a != b for a, b in pairwise(row["question"] for row in rows()))
    assert len(PAGE.read_text().split()) <= 900
