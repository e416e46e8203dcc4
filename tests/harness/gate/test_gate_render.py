"""Oracle: what a reader and a program must find in the three forms of one judgement."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from gate_fixtures import Times, control_row, failed_row, time_row, value_row, write

from harness.__main__ import main
from harness.gate import render
from harness.gate.judge import Judgement, judge
from harness.gate.policy import load_policy
from harness.gate.sides import load_side


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    times, noisy = Times(), Times(0.1, seed=2)
    clean = [value_row(1, "sqnr_db", float("inf")), control_row(times())]
    before = [time_row(1, times()), time_row(2, noisy()), time_row(3, times()), *clean]
    after = [time_row(1, times(1.2), "fp8"), time_row(2, noisy()), time_row(3, times(0.8)), *clean]
    folders = write(tmp_path / "a", before), write(tmp_path / "b", after)
    again = Times(seed=1)
    write(folders[0], [time_row(1, again()), time_row(3, again())], stage=2)
    write(folders[1], [time_row(1, again(1.2)), time_row(3, again(0.8))], stage=2)
    return folders


@pytest.fixture
def judgement(sides: tuple[Path, Path]) -> Judgement:
    return judge(load_side(sides[0], "baseline", ""), load_side(sides[1], "candidate", ""), load_policy())


def test_the_terminal_shows_the_worst_first_and_ends_with_the_verdict(judgement: Judgement) -> None:
    lines = render.terminal(judgement).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["REGRESSED", "INCONCLUSIVE", "IMPROVED"]
    assert "+20." in lines[1]
    assert "confirmed on fresh data" in lines[1]
    assert "cause:" not in lines[1]  # neither calls nor cycles were counted
    assert lines[-1].startswith("REGRESSED (exit 1): 1 REGRESSED, 1 INCONCLUSIVE, 1 IMPROVED, 1 OK")
    assert any("NVIDIA H200 at 700 W, torch 2.13.0+cu128" in line for line in lines)


def test_an_arm_that_is_lost_is_one_row(tmp_path: Path) -> None:
    before = [time_row(1, Times()()), value_row(1, "sqnr_db", 28.5), value_row(1, "rel_err_max", 0.1)]
    after = [failed_row(1, "Unsupported: graph break"), time_row(2, Times()())]
    folders = write(tmp_path / "a", before), write(tmp_path / "b", after)
    found = judge(
        load_side(folders[0], "baseline", ""), load_side(folders[1], "candidate", ""), load_policy()
    )
    for text in (render.terminal(found), render.markdown(found)):
        assert text.count("graph break") == 1
        assert " and 2 more" in text
    assert render.as_json(found).count("Unsupported: graph break: what cannot be compared") == 3


def test_no_regression_is_hidden_among_what_is_ok(tmp_path: Path) -> None:
    many = range(render.SHOWN + 5)
    rows = [[value_row(n, "rel_err_max", value) for n in many] for value in (0.1, 0.5)]
    folders = write(tmp_path / "a", rows[0]), write(tmp_path / "b", rows[1])
    found = judge(
        load_side(folders[0], "baseline", ""), load_side(folders[1], "candidate", ""), load_policy()
    )
    assert "... and 5 more, 5 of them not OK (--json FILE holds them)" in render.terminal(found)
    assert "And 5 more, 5 of them not OK." in render.markdown(found)


def test_json_holds_everything_and_is_strict(judgement: Judgement) -> None:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    document = json.loads(render.as_json(judgement), parse_constant=no_constant)
    assert (document["exit_code"], document["verdict"], document["mode"]) == (1, "REGRESSED", "paired")
    assert document["counts"] == {"REGRESSED": 1, "INCONCLUSIVE": 1, "IMPROVED": 1, "OK": 1}
    by_metric = {(f["metric"], f["case"]): f for f in document["findings"]}
    assert by_metric["sqnr_db", "1x64x64"]["before"] == "inf"
    assert by_metric["time_ms", "2x64x64"]["more_rounds"] > 0
    assert by_metric["time_ms", "1x64x64"]["counts"] is True


def test_markdown_is_a_table_that_no_name_breaks(judgement: Judgement) -> None:
    for finding in judgement.findings:
        finding.unit.case = "a | b\nc"
    lines = render.markdown(judgement).splitlines()
    assert lines[0] == "### Gate: REGRESSED"
    table = [line for line in lines if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1


def test_no_test_writes_into_the_summary_of_the_job_that_runs_it(request: pytest.FixtureRequest) -> None:
    assert "GITHUB_STEP_SUMMARY" not in os.environ
    assert "_no_step_summary" in request.fixturenames


def test_the_step_summary_is_appended_to(
    sides: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    words = ["gate", "--baseline", str(sides[0]), "--candidate", str(sides[1])]
    outputs = ["--json", str(tmp_path / "v.json"), "--markdown", str(tmp_path / "v.md")]
    assert main([*words, *outputs]) == 1
    assert summary.read_text() == "before\n" + (tmp_path / "v.md").read_text() + "\n"
    assert json.loads((tmp_path / "v.json").read_text())["exit_code"] == 1
    assert capsys.readouterr().out.endswith("1 OK\n")


def test_a_refusal_reaches_the_step_summary(
    sides: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main(["gate", "--baseline", "no-such-run", "--candidate", str(sides[1])]) == 5
    assert summary.read_text().startswith("### Gate: no verdict (exit 5)\n\nbaseline: no run 'no-such-run'")


def test_a_summary_that_cannot_be_written_costs_no_verdict(
    sides: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    assert main(["gate", "--baseline", str(sides[0]), "--candidate", str(sides[1])]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("REGRESSED (exit 1)")
    assert err.startswith("warning: cannot write the step summary")


def test_what_was_not_decided_is_not_called_ok(tmp_path: Path) -> None:
    noisy = Times(0.1, seed=2)
    folders = [write(tmp_path / name, [time_row(1, noisy())]) for name in "ab"]
    found = judge(
        load_side(folders[0], "baseline", ""), load_side(folders[1], "candidate", ""), load_policy()
    )
    assert render.headline(found) == "COULD NOT JUDGE 1 of 1"
    assert render.terminal(found).splitlines()[-1].startswith("COULD NOT JUDGE 1 of 1 (exit 6): ")
    assert render.markdown(found).startswith("### Gate: COULD NOT JUDGE 1 of 1")
