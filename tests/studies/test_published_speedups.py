"""The prediction against published speedups. Oracle: the tables of reports/published/studies/speedups.md, recomputed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documented_table import documented
from published_speedups import (
    Outcome,
    of_half,
    outcome,
    table,
)
from speedups.halves import FITTED, HELD_OUT, half
from speedups.table import CASES, RAW

from harness.advise import decide
from harness.store.tables import rows_beside

PAGE = Path(__file__).parents[2] / "reports" / "published" / "studies" / "speedups.md"
HALVES = (FITTED, HELD_OUT)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {case.key: outcome(case) for case in CASES}


def of(half: str, outcomes: dict[str, Outcome]) -> list[Outcome]:
    return [outcomes[row.case.key] for row in of_half(half)]


@pytest.mark.parametrize("half", HALVES)
def test_the_page_lists_every_case_with_its_prediction_and_every_miss(
    half: str, outcomes: dict[str, Outcome]
) -> None:
    """Words exactly; figures to 0.01, since another torch may trace a norm as more or fewer operators."""
    lines, expected = documented(PAGE, half), table(of(half, outcomes), of_half(half))
    assert len(lines) == len(expected)
    number = re.compile(r"-?\+?\d+\.\d+")
    for line, due in zip(lines, expected, strict=True):
        assert number.sub("#", line) == number.sub("#", due)
        points = " | " in due
        for shown, true in zip(number.findall(line), number.findall(due), strict=True):
            assert float(shown) == pytest.approx(
                float(true), abs=0.011 if points and abs(float(true)) < 3 else 1.0
            )


def test_the_advice_is_on_for_nothing_that_was_measured_slower(outcomes: dict[str, Outcome]) -> None:
    """But for one that was measured flat: 0.997 of bf16, one run, MPT 3b at length 32768."""
    false = [o.case.key for o in outcomes.values() if o.false]
    assert false == ["MPT 3b, length 32768"]
    assert outcomes[false[0]].sign == "flat"
    wrong = [o for o in outcomes.values() if o.sign == "wrong"]
    assert [(o.case.key, o.said) for o in wrong if o.case.known] == [
        ("8B, TP2 and FSDP2, rowwise", "can't tell")
    ]
    assert {o.case.key: o.said for o in wrong if not o.case.known} == {
        "70B, 128 H100, TP8, rowwise": "can't tell",
        "70B, up to 1856 B200, mxfp8": "off",
    }


@pytest.mark.parametrize(("half", "least"), [(FITTED, 0.80), (HELD_OUT, 0.75)])
def test_points(half: str, least: float, outcomes: dict[str, Outcome]) -> None:
    """What holds. The aim was 85 % within 10 points; docs/advise-accuracy.md says by how much it is missed."""
    steps = [o for o in of(half, outcomes) if o.case.known and o.is_step]
    assert len(steps) >= 10
    assert sum(o.hit for o in steps) / len(steps) >= least
    assert sum(o.inside for o in steps) / len(steps) >= least


def test_every_row_lies_in_the_half_that_its_key_says() -> None:
    """Oracle: coreutils, so that no later change can move a row: printf '%s' 'RFC of 2023|llama2_7b|H100 500 W, HBM2e|tensorwise' | sha256sum"""
    assert half("RFC of 2023", "llama2_7b", "H100 500 W, HBM2e", "tensorwise") == FITTED  # 0x61: from 86 on
    for cells in RAW:
        assert cells["half"] == half(cells["source"], cells["model"], cells["gpu"], cells["recipe"])


def test_the_low_end_of_rowwise_steps_under_tensor_parallelism_is_the_slowest_published_one() -> None:
    """Oracle: published.csv, whose rows of that kind the file in the wheel repeats."""
    published = [
        (row["measured"], row["case"], row["source"])
        for row in RAW
        if row["recipe"] == "rowwise" and int(row["tp"]) > 1
    ]
    assert [tuple(row.values()) for row in rows_beside(decide.__file__, "rows_split.csv")] == published
    assert min(float(measured) for measured, *_ in published) == decide._ROWS_SPLIT
