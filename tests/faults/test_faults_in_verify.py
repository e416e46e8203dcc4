"""reports/published/studies/verify-faults.md says of every planted fault whether `verify` catches it; here each line is tried.

Oracle: the page's own table, and the same step without the fault, of which `verify` says nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_catalogue import Fault
from layer_faults import ALL_FAULTS
from verified_models import caught

PAGE = Path(__file__).parents[2] / "reports" / "published" / "studies" / "verify-faults.md"
FAST = (
    "grad_input negated", "gradients 1.3 times too large", "subnormal codes flushed", "NaN becomes 448",
    "gradients of microbatches summed in bfloat16", "e4m3 gradients where e5m2 is promised",
    "experts' grad_weight 1.3 times too large", "scales of a and b changed places", "bias added before the scales",
)  # fmt: skip


def lines() -> dict[str, list[str]]:
    """The page's table: fault -> its other cells."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return {row[0]: row[1:] for row in cells if row[0] in ALL_FAULTS}


def test_the_page_has_a_line_for_every_fault_with_its_check() -> None:
    found = lines()
    assert found.keys() == ALL_FAULTS.keys()
    for name, (recipe, check, verdict, _) in found.items():
        fault: Fault = ALL_FAULTS[name]
        assert (recipe, check) == (fault.recipe, f"`{fault.caught_by}`"), name
        assert verdict in ("caught", "not by construction"), name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in ALL_FAULTS]
)
def test_a_line(name: str) -> None:
    verdict = lines()[name][2]
    assert bool(caught(ALL_FAULTS[name])) == (verdict == "caught")
