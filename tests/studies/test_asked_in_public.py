"""Answers to public questions. Oracles: the figures that the askers published, in the CSV; the page, recomputed."""

from __future__ import annotations

import re

import pytest
from asked_in_public import PAGE, answered, ask, rows, unasked
from documented_table import documented

NUMBER = re.compile(r"\d+\.\d+")
ASKED = [row for row in rows() if row["words"]]


def _line(key: str) -> str:
    (line,) = (line for line in documented(PAGE, "answered") if f"[{key}](" in line)
    return line


def test_page_and_file_hold_the_same_rows() -> None:
    assert [line.split("](")[0] for line in documented(PAGE, "answered")[2:]] == [
        f"| [{r['key']}" for r in ASKED
    ]
    assert documented(PAGE, "unasked") == unasked()
    assert len({row["key"] for row in rows()}) == len(rows())
    for row, line in zip(ASKED, documented(PAGE, "answered")[2:], strict=True):
        assert all(row[name] in line for name in ("source", "question", "measured", "why"))


@pytest.mark.parametrize("key", ["torchtitan issue 1207"])
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
