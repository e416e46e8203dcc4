"""What plain casts do by version, in reports/published/studies/plain-casts.md. Oracles: rows written by hand; the published rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from plain_casts import BEGIN, END, INPUTS, block, main, written
from report_fixtures import CPU, H200, absent, figure, write_run

from harness.report.runs import load
from harness.report.verdicts import is_sound
from harness.store.case import Case
from harness.store.errors import UsageError
from harness.store.measurement import Measurement
from harness.suites import codes

ROOT = Path(__file__).parents[2]
DOC = ROOT / "reports" / "published" / "studies" / "plain-casts.md"


def cell(arm: str, source: str, inputs: str, wrong: float, patterns: int = 1000) -> Measurement:
    case = Case.of("codes", {"source": source, "dtype": "e4m3fn", "inputs": inputs})
    return replace(figure(case, arm, "mismatches", wrong), resolved={"patterns": patterns})


def rows(overflow: float) -> list[Measurement]:
    return [
        *(
            cell("plain", source, kind, 0.0)
            for source in ("bf16", "fp16")
            for kind in ("normal", "subnormal")
        ),
        *(cell("plain", source, "overflow", overflow) for source in ("bf16", "fp16")),
        cell("saturating", "bf16", "normal", 0.0),
        absent(
            Case.of("codes", {"source": "bf16", "dtype": "e4m3fn", "inputs": "nan"}),
            "kernels",
            "failed",
            "9 differ",
        ),
    ]


def test_each_environment_has_its_group_of_columns(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [rows(0.0)], sweep="codes", env=CPU)
    write_run(
        tmp_path / "b", [rows(1000.0)], sweep="codes", env=H200 | {"torch": "2.11.0+cu130", "cuda": "13.0"}
    )
    lines = block(load([tmp_path], tmp_path).machines).splitlines()
    assert lines[0] == (
        "| cast | torch 2.11.0, CUDA 13.0: normal | subnormal | overflow | Inf | NaN | "
        "torch 2.13.0, CPU: normal | subnormal | overflow | Inf | NaN |"
    )
    assert lines[2:5] == [
        "| `.to()` to e4m3fn from bf16, fp16 | 0 | 0 | all |  |  | 0 | 0 | 0 |  |  |",
        "| fp8core to e4m3fn from bf16 | 0 |  |  |  |  | 0 |  |  |  |  |",
        "| fp8core's kernels to e4m3fn from bf16 |  |  |  |  | failed |  |  |  |  | failed |",
    ]
    assert sum("NVIDIA H200" in line for line in lines) == 1


def test_sources_that_differ_have_a_row_each_and_the_newest_run_counts(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [rows(1000.0)], sweep="codes", env=CPU, run_id="20260101T000000Z-0000000-aaaa")
    newer = [cell("plain", "fp16", "overflow", 7.0)]
    write_run(tmp_path / "b", [newer], sweep="codes", env=CPU, run_id="20260102T000000Z-0000000-bbbb")
    lines = block(load([tmp_path], tmp_path).machines).splitlines()
    assert lines[2] == "| `.to()` to e4m3fn from bf16 | 0 | 0 | all |  |  |"
    assert lines[3] == "| `.to()` to e4m3fn from fp16 | 0 | 0 | 7 of 1,000 |  |  |"


def test_only_what_stands_between_the_marks_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "a", [rows(0.0)], sweep="codes", env=CPU)
    machines = load([run], tmp_path).machines
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = written(text, machines)
    assert new.startswith(f"before\n{BEGIN}\n\n| cast |")
    assert new.endswith(f"{END}\nafter\n")
    assert "old" not in new
    assert written(new, machines) == new
    page = tmp_path / "page.md"
    page.write_text(text)
    assert main([str(run), str(page)]) == 0
    assert page.read_text() == new
    page.write_text("no place")
    assert main([str(run), str(page)]) == 2
    assert main([str(page)]) == 2
    assert "no place for the table" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no rows of suite codes"):
        block([])


def test_the_table_in_docs_is_what_the_published_rows_say() -> None:
    """Run `make published` where this fails."""
    machines = load([ROOT / "results" / "published"], ROOT).machines
    assert DOC.read_text() == written(DOC.read_text(), machines)


def test_every_kind_of_input_and_arm_has_its_words() -> None:
    from plain_casts import ARMS

    assert set(INPUTS) == set(codes.INPUTS)
    assert set(ARMS) == set(codes.ARMS)


@pytest.mark.parametrize(("arm", "verdict"), [("plain", "can't tell"), ("saturating", "no")])
def test_a_plain_cast_is_shown_and_not_judged(tmp_path: Path, arm: str, verdict: str) -> None:
    """It does what torch does; a report that calls its own casts wrong for it would be wrong. Right codes are no sound step."""
    right = [cell("saturating", "bf16", kind, 0.0) for kind in ("normal", "subnormal")]
    run = write_run(tmp_path, [[*right, cell(arm, "bf16", "overflow", 1000.0)]], sweep="codes", env=CPU)
    (machine,) = load([run], tmp_path).machines
    assert is_sound(machine).verdict == verdict
