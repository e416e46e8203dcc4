"""The prediction against published speedups. Oracle: the tables of reports/published/studies/speedups.md, recomputed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from documented_table import documented
from published_speedups import (
    OTHER_MODELS,
    POINTS,
    TE_LAYER,
    Outcome,
    machine,
    of_half,
    outcome,
    summary,
    table,
)
from speedups.case import META_H100
from speedups.halves import FITTED, HELD_OUT
from speedups.table import CASES

from harness.machine.hardware import DEVICES
from harness.training.models import MODELS

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


@pytest.mark.parametrize("half", HALVES)
def test_the_page_of_accuracy_repeats_the_summaries_of_the_tables(half: str) -> None:
    """Oracle: the figures below each table, which the test above recomputes."""
    page = (PAGE.parents[3] / "docs" / "advise-accuracy.md").read_text()
    column = 1 + HALVES.index(half)
    rows = [line.split("|")[1 + column] for line in re.findall(r"^\|.*\|$", page, re.MULTILINE)[2:8]]
    shown = [int(n) for row in rows for n in re.findall(r"\d+", row.replace(".", ""))]
    lines = documented(PAGE, half)[-4:]
    due = [re.findall(r"\d+(?:\.\d+)?", line.partition("(")[0]) for line in lines]
    steps = re.findall(r"\d+(?:\.\d+)?", lines[2])
    kept = [*due[0], *due[1], steps[0], steps[1], steps[3], steps[4], *steps[-1:], *due[3][1:3]]
    assert shown == [int(n.replace(".", "")) for n in kept]


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


def test_the_cases_that_the_question_names(outcomes: dict[str, Outcome]) -> None:
    """Llama-3-8B pays on H100; TP8 rowwise got slower; k and v alone lose; GPT-2's scale is near a tie, rowwise below."""
    assert outcomes["8B, 8 H100, tensorwise"].predicted.low > 1
    assert outcomes["8B, TP8, rowwise"].predicted.value < 0.95
    assert outcomes["k or v of 70B at TP8, rowwise"].predicted.high < 1
    assert outcomes["GPT-2 scale, 8 H100, tensorwise"].predicted.value < 1.1
    assert outcomes["GPT-2 scale, 8 H100, rowwise"].predicted.value < 1
    filtered, whole = outcomes["70B, TP8, rowwise without k and v"], outcomes["70B, TP8, rowwise"]
    assert filtered.predicted.value > whole.predicted.value + 0.05


def test_cases_are_complete() -> None:
    assert len({case.key for case in CASES}) == len(CASES)
    keys = {device.key for device in DEVICES}
    for case in CASES:
        assert case.source
        assert case.machine in keys | {META_H100}
        assert case.layer is not None or case.model in {*MODELS, *OTHER_MODELS, TE_LAYER}
        assert case.known or case.note
        assert 0.4 < case.measured < 2
    assert machine(META_H100)["bf16"] < machine("H100 SXM")["bf16"]


def test_what_hits_and_signs_mean(outcomes: dict[str, Outcome]) -> None:
    one = outcomes["8B, 8 H100, tensorwise"]
    off = one.case.measured + POINTS + 0.01

    def like(predicted: float, measured: float) -> Outcome:
        return replace(
            one, case=replace(one.case, measured=measured), predicted=replace(one.predicted, value=predicted)
        )

    assert not like(off, one.case.measured).hit
    assert [like(p, m).sign for p, m in ((1.1, 1.2), (0.9, 1.2), (1.007, 0.965), (0.9, 1.01))] == [
        "right",
        "wrong",
        "wrong",
        "flat",
    ]
    assert "0 of 1 within" in summary([like(off, one.case.measured)])[2]
