"""The prediction against published throughputs. Oracle: reports/published/studies/scale.md and its CSV, recomputed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documented_table import documented
from published_throughputs import Outcome, left_out, outcome, summary, table
from speedups.throughputs import LEFT_OUT, PUBLISHED

PAGE = Path(__file__).parents[2] / "reports" / "published" / "studies" / "scale.md"


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [outcome(case) for case in PUBLISHED]


def test_the_page_lists_every_figure_with_its_error(outcomes: list[Outcome]) -> None:
    """Words exactly; figures to 2 % or one unit, since another torch may trace a norm as more or fewer operators."""
    figures = PAGE.with_name("scale-published.csv").read_text().splitlines()
    lines, expected = [*figures, *documented(PAGE, "published")], [*table(outcomes), *summary(outcomes)]
    assert len(lines) == len(expected)
    number = re.compile(r"[+-]?\d+\.?\d*")
    for line, due in zip(lines, expected, strict=True):
        assert number.sub("#", line) == number.sub("#", due)
        for shown, true in zip(number.findall(line), number.findall(due), strict=True):
            assert float(shown) == pytest.approx(float(true), rel=0.02, abs=1.01)


def test_the_page_says_what_is_not_predicted() -> None:
    assert documented(PAGE, "left out") == left_out()
    assert all(LEFT_OUT.values())
