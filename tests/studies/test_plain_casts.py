"""What plain casts do by version, in reports/published/studies/plain-casts.md. Oracle: the published rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from documented_table import documented
from plain_casts import block
from report_fixtures import CPU, figure, write_run

from harness.report.runs import load
from harness.report.verdicts import is_sound
from harness.store.case import Case

if TYPE_CHECKING:
    from harness.store.measurement import Measurement

ROOT = Path(__file__).parents[2]
DOC = ROOT / "reports" / "published" / "studies" / "plain-casts.md"


def cell(arm: str, source: str, inputs: str, wrong: float, patterns: int = 1000) -> Measurement:
    case = Case.of("codes", {"source": source, "dtype": "e4m3fn", "inputs": inputs})
    return replace(figure(case, arm, "mismatches", wrong), resolved={"patterns": patterns})


def test_the_table_in_docs_is_what_the_published_rows_say() -> None:
    """Run `make published` where this fails."""
    machines = load([ROOT / "results" / "published"], ROOT).machines
    assert documented(DOC, "casts") == block(machines).splitlines()


@pytest.mark.parametrize(("arm", "verdict"), [("plain", "can't tell"), ("saturating", "no")])
def test_a_plain_cast_is_shown_and_not_judged(tmp_path: Path, arm: str, verdict: str) -> None:
    """It does what torch does; a report that calls its own casts wrong for it would be wrong. Right codes are no sound step."""
    right = [cell("saturating", "bf16", kind, 0.0) for kind in ("normal", "subnormal")]
    run = write_run(tmp_path, [[*right, cell(arm, "bf16", "overflow", 1000.0)]], sweep="codes", env=CPU)
    (machine,) = load([run], tmp_path).machines
    assert is_sound(machine).verdict == verdict
