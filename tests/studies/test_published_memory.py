"""The memory model against published peaks. Oracle: reports/published/studies/memory.md, recomputed, and the published figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from documented_table import documented
from published_memory import Outcome, differences, outcomes, summary, table

from harness.advise.memory import MARGIN

PAGE = Path(__file__).parents[2] / "reports" / "published" / "studies" / "memory.md"


@pytest.fixture(scope="module")
def found() -> list[Outcome]:
    return outcomes()


def test_the_page_has_every_figure_with_its_error(found: list[Outcome]) -> None:
    assert documented(PAGE, "summary") == summary(found)
    assert documented(PAGE, "published") == table(found)
    assert documented(PAGE, "differences") == differences(found)


def test_no_published_step_takes_more_than_the_margin_allows(found: list[Outcome]) -> None:
    """ "fits" asks for so much room that none of the published steps would have been called so and failed."""
    assert max(one.case.gib / one.predicted for one in found) <= MARGIN
