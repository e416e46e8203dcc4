"""Which library was chosen. Oracle: ratios of the times that these tests make up; nothing here was measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from report_cases import tiny_run
from report_fixtures import Invented, absent, write_run

from harness.report import write_report
from harness.report.libraries import Choice, choices
from harness.report.runs import load
from harness.store.case import Case
from harness.store.measurement import Measurement

OURS = Case.of("gemm", {"role": "output", "M": 16384, "K": 4096, "N": 14336})
THEIRS = Case.of("gemm", {"role": "grad_input", "M": 512, "K": 8192, "N": 1024})
QUIET = Invented(spread=0.0)  # rounds drift together: a paired ratio is exact


def product(
    case: Case, torch: float, triton: float, fastest: float, chosen: str, **more: float
) -> list[Measurement]:
    """Rows of both libraries and of the choice, which has fewer rounds, other arms beside them."""
    arms: dict[str, dict[str, Any]] = {
        "rowwise_eager": {"ms": torch},
        "rowwise_triton_eager": {"ms": triton, "baseline": "rowwise_eager"},
        "rowwise_fastest_eager": {
            "ms": fastest, "baseline": "rowwise_eager", "rounds": 4, "resolved": {"chosen": chosen},
        },
        **{arm: {"ms": ms} for arm, ms in more.items()},
    }  # fmt: skip
    return QUIET.times(case, arms)


def found(folder: Path, *cases: list[Measurement], **more: object) -> list[Choice]:
    write_run(folder, list(cases), **more)
    (machine,) = load([folder], folder).machines
    return choices(machine)


def test_the_choice_is_judged_by_the_better_library_in_the_same_rounds(tmp_path: Path) -> None:
    """Oracle: 1 / 1, and 1 / 1.1, whose interval lies below 0.95; drift of the rounds cancels."""
    ours, theirs = found(
        tmp_path,
        product(OURS, 2.0, 1.0, 1.0, "triton", blockwise_triton_eager=0.8),
        product(THEIRS, 1.0, 2.0, 1.1, "torch"),
    )
    assert (ours.product, ours.chosen, theirs.chosen) == ("rowwise_eager", "triton", "torch")
    assert [ours.of_best, ours.low, ours.high] == pytest.approx([1.0] * 3)
    assert [theirs.of_best, theirs.high] == pytest.approx([1 / 1.1] * 2)
    assert (ours.below, theirs.below) == (False, True)
    assert ours.blocks == pytest.approx(1.25)
    assert math.isnan(theirs.blocks)
    assert ours.times["triton"] == pytest.approx(1.0, rel=0.1)


def test_what_lacks_a_time_is_not_judged(tmp_path: Path) -> None:
    """A library that was skipped or not asked for, a choice that was skipped, and too few rounds for an interval."""
    whole = product(OURS, 2.0, 1.0, 1.0, "triton")
    for number, arm in enumerate(("rowwise_eager", "rowwise_triton_eager", "rowwise_fastest_eager")):
        rows = [row for row in whole if row.arm != arm]
        for own in (rows, [*rows, absent(OURS, arm, "skipped", "no kernel")]):
            assert found(tmp_path / f"{number}-{len(own)}", own) == []
    few = QUIET.times(OURS, {row.arm: {"ms": 1.0, "rounds": 2} for row in whole})
    assert found(tmp_path / "few", few) == []


def test_the_newest_run_counts(tmp_path: Path) -> None:
    write_run(tmp_path, [product(OURS, 1.0, 2.0, 1.0, "torch")], run_id="20260101T000000Z-0123456-aaaa")
    newest = product(OURS, 2.0, 1.0, 1.0, "triton")
    (choice,) = found(tmp_path, newest, run_id="20260202T000000Z-0123456-bbbb")
    assert choice.chosen == "triton"


@pytest.mark.parametrize(
    ("slow", "said"), [(1.1, "1 of 2 products fall below it"), (1.01, "none falls below it")]
)
def test_the_page_names_the_worst_choice_and_the_bar(slow: float, said: str, tmp_path: Path) -> None:
    write_run(tmp_path, [product(OURS, 2.0, 1.0, 1.0, "triton"), product(THEIRS, 1.0, 2.0, slow, "torch")])
    page = write_report([tmp_path], tmp_path / "out.html").markdown.read_text()
    assert 'Backend "fastest" took cuBLAS for 1 and fp8core\'s kernel for 1 of 2 products' in page
    assert f"the bar is 0.95, {said}" in page
    assert "512x8192x1024" in page
    assert "blockwise" not in page


def test_nothing_is_said_where_nothing_was_measured(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    assert 'Backend "fastest"' not in write_report([tmp_path], tmp_path / "out.html").markdown.read_text()
