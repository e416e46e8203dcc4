"""Oracles: fleets made up with a known fault in a known card (fleet_fixtures), CPU runs for real."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_fixtures import BASE_MS, CASES, CHECK, card, env, failed, judged, names, sustained, time
from report_fixtures import figure, write_run

import harness.judge.fleet
from harness.__main__ import main
from harness.cli.config import load
from harness.engine.plan import make_plan
from harness.store.case import Case
from harness.suites import SUITES

ROOT = Path(harness.judge.fleet.__file__).parents[3]
LONG = Case.of("gemm", {"M": 8192, "K": 64, "N": 64})  # on the cards that are told to have it
ECC = "CUDA error: uncorrectable ECC"


def test_healthy_cards_are_in_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in names(8):
        card(tmp_path, name)
    (group,) = judged(tmp_path)
    assert not group.outliers
    assert {(s.suite, s.regime, s.arm, s.cards, s.cases) for s in group.spreads} == {
        (suite, "isolated", arm, 8, count) for suite, count in (("gemm", 3), ("cast", 2)) for arm in BASE_MS
    }
    assert all(-0.04 < s.low <= 0 <= s.high < 0.04 for s in group.spreads)
    assert main(["fleet", str(tmp_path)]) == 0
    assert "no card out of line; judged by times 8 of 8, by results 8\n" in capsys.readouterr().out


def test_what_two_cards_measured_judges_none(tmp_path: Path) -> None:
    """One of the two took three times as long; which of them is at fault nobody can tell."""
    for name, slow in zip(names(4), (1.0, 3.0, None, None), strict=True):
        card(tmp_path, name, extra=[[time(LONG, "bf16_eager", 16 * slow)]] if slow else [])
    (group,) = judged(tmp_path)
    assert not group.outliers
    assert {s.cases for s in group.spreads if s.suite == "gemm"} == {3}
    assert all(s.high < 0.04 for s in group.spreads)


@pytest.mark.parametrize(
    ("fault", "suite", "kind", "why"),
    [
        ({"slow": 1.12, "clock": 1500.0, "throttled": True}, "gemm", "slow", "throttled in 6 of 6"),
        ({"slow": 1.12, "clock": 1500.0}, "gemm", "slow", "SM clock 85%"),
        ({"slow": 1.2, "power_limit_w": 350.0}, "gemm", "slow", "power_limit_w 350.0, most others 700.0"),
        ({"slow": 1.2}, "gemm", "slow", "at the others' clock and power limit"),
        ({"slow_casts": 1.3}, "cast", "slow", "memory"),
        ({"slow": 0.85, "driver": "999.1"}, "gemm", "fast", "driver 999.1"),
        ({"checksum": "badbad"}, "checksum", "corrupt", "5 of 6 cards give c0ffee"),
        ({"fails": ECC}, "gemm", "fails", ECC),
        ({"extra": [failed(CASES[0], ECC, "sustained")]}, "gemm", "fails", ECC),
    ],
)
def test_a_planted_fault_is_found_where_it_is_with_its_cause(
    fault: dict[str, object],
    suite: str,
    kind: str,
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in names(5):
        card(tmp_path, name)
    card(tmp_path, "beef", **fault)
    (group,) = judged(tmp_path)
    (outlier,) = group.outliers
    assert (outlier.card[:4], outlier.suite, outlier.kind) == ("beef", suite, kind)
    assert why in outlier.reason
    assert main(["fleet", str(tmp_path)]) == 1
    assert "1 card of 6 out of line: beef" in capsys.readouterr().out


def test_the_slowest_card_bounds_what_may_be_claimed(tmp_path: Path) -> None:
    """Oracle: three cards without noise, by hand: speedups 1.6, 1.6 and 1.6 / 1.02, times 1, 1 and 1.02."""
    for name, factor in {"aaaa": 1.0, "bbbb": 1.0, "cccc": 1.02}.items():
        rows = [[time(case, "bf16_eager", 2.0), time(case, "rowwise_eager", 1.25 * factor)] for case in CASES]
        write_run(tmp_path / name, rows, run_id=name, env=env(name))
    (group,) = judged(tmp_path)
    (spread,) = [s for s in group.spreads if s.arm == "rowwise_eager"]
    assert spread.slowest[:4] == "cccc"
    assert spread.high == pytest.approx(0.02)
    assert spread.speedup == pytest.approx(1.6)
    assert spread.slowest_speedup == pytest.approx(1.6 / 1.02)
    assert [s.speedup for s in group.spreads if s.arm == "bf16_eager"] == [None]


def test_the_limit_is_the_tolerance_or_three_and_a_half_robust_deviations(tmp_path: Path) -> None:
    """Scores 0, 1, 2, 3 and 4 tenths: median 0.2, median absolute deviation 0.1, limit 3.5 x 1.4826 x 0.1 = 0.519."""
    for far, count in ((0.7, 0), (0.75, 1)):
        folder = tmp_path / str(far)
        for i, score in enumerate([0.0, 0.1, 0.2, 0.3, far]):
            rows = [time(CASES[0], "bf16_eager", math.exp(score))]
            write_run(folder / str(i), [rows], run_id=str(i), env=env(f"{i}" * 4))
        (group,) = judged(folder)
        assert len(group.outliers) == count


def test_what_differs_between_the_cards_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in names(3):
        card(tmp_path, name)
    card(tmp_path, "beef", driver="580.1", power_limit_w=600.0)
    (group,) = judged(tmp_path)
    assert set(group.differences) == {"driver", "power_limit_w"}
    assert [cards[0][:4] for cards in group.differences["power_limit_w"].values()][-1] == "beef"
    assert main(["fleet", str(tmp_path), "markdown=true"]) == 0
    assert "| power_limit_w | 600.0 | 1: beef" in capsys.readouterr().out.replace("\\_", "_")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"gpu": "NVIDIA L40S"}),
        ({}, {"torch": "2.11.0"}),
        ({}, {"git_commit": "f" * 40}),  # of before the code was hashed
        ({"code": "aaaa"}, {"code": "bbbb"}),  # two trees with uncommitted changes
        ({"gpu_sm_count": 132}, {"gpu_sm_count": 114}),
        ({"mig": False}, {"mig": True}),
    ],
)
def test_other_models_software_and_code_are_not_set_side_by_side(
    one: dict[str, object], other: dict[str, object], tmp_path: Path
) -> None:
    for name in names(3):
        card(tmp_path, name, **one)
    card(tmp_path, "beef", slow=3.0, checksum="badbad", **other)
    found = judged(tmp_path)
    assert [len(group.cards) for group in found] == [3, 1]
    assert not any(group.outliers for group in found)


def test_one_code_of_two_commits_is_one_code(tmp_path: Path) -> None:
    """A commit that changes no code (a page, a log) changes no time; and MIG that can't be asked for is off."""
    for name in names(3):
        card(tmp_path, name, code="aaaa", mig=False)
    card(tmp_path, "beef", slow=1.3, code="aaaa", mig=None, git_commit="f" * 40)
    (group,) = judged(tmp_path)
    assert [o.card[:4] for o in group.outliers] == ["beef"]
    assert set(group.differences) == {"git_commit"}


@pytest.mark.parametrize("software", [{"code": "old"}, {"torch": "2.11.0"}])
def test_a_card_is_judged_on_what_it_measured_with_the_software_of_the_others(
    software: dict[str, object], tmp_path: Path
) -> None:
    """It took half as long again before; with the present software only its result is known."""
    now = {"code": "new"}
    for name in names(4):
        card(tmp_path / "now", name, **now)
    card(tmp_path / "before", "beef", slow=1.5, **now | software)
    result = figure(CHECK, "rowwise_eager", "mismatches", 0.0, resolved={"checksum": "c0ffee"})
    write_run(tmp_path / "now" / "beef", [[result]], run_id="beef", sweep="fleet", env=env("beef", **now))
    found = judged(tmp_path)
    assert [len(group.cards) for group in found] == [5, 1]
    assert not any(group.outliers for group in found)
    assert len(found[0].timed) == 4


def test_cards_that_were_given_one_run_id_do_not_replace_each_other(tmp_path: Path) -> None:
    for name in names(4):
        card(tmp_path, name, run_id="night")
    (group,) = judged(tmp_path)
    assert len(group.cards) == 4
    assert {s.cards for s in group.spreads} == {4}


def test_the_newest_measurement_of_a_card_counts(tmp_path: Path) -> None:
    card(tmp_path / "old", "beef", slow=5.0)
    for name in (*names(4), "beef"):
        card(tmp_path / "new", name)
    (group,) = judged(tmp_path)
    assert len(group.cards) == 5
    assert not group.outliers


@pytest.mark.parametrize("lead", [1, 2, 3])
def test_throttling_under_load_alone_is_found(lead: int, tmp_path: Path) -> None:
    """25 % slower in each sustained row, of as many cases as were measured so; well in all others."""
    for name in (*names(5), "beef"):
        bad = name == "beef"
        card(tmp_path, name, extra=[sustained(c, 1.25 if bad else 1.0, bad) for c in CASES[:lead]])
    (group,) = judged(tmp_path)
    (outlier,) = group.outliers
    assert (outlier.card[:4], outlier.suite, outlier.regime) == ("beef", "gemm", "sustained")
    assert outlier.off == pytest.approx(0.25)
    assert f"throttled in {2 * lead} of {2 * lead}" in outlier.reason
    high = {(s.regime, s.high > 0.2) for s in group.spreads if s.suite == "gemm"}
    assert high == {("isolated", False), ("sustained", True)}


def test_slow_memory_alone_is_found_by_the_cases_of_the_sweep(tmp_path: Path) -> None:
    """Its copy takes a quarter longer and its products as long as the others'."""
    plan = make_plan(load(["sweep=fleet"], lambda asked: "cuda").config, SUITES)
    for name in (*names(4), "beef"):
        slow = {"ceilings": 1.25} if name == "beef" else {}
        rows = [[time(c.case, a, slow.get(c.case.suite, 1.0)) for a in c.arms] for c in plan.cases]
        write_run(tmp_path / name, rows, run_id=name, sweep="fleet", env=env(name))
    (group,) = judged(tmp_path)
    assert [(o.card[:4], o.suite, o.kind) for o in group.outliers] == [("beef", "ceilings", "slow")]


@pytest.mark.parametrize("regime", ["", "sustained"])
@pytest.mark.parametrize(("broken", "whole", "blamed"), [(1, 1, 1), (2, 2, 2), (3, 2, 0), (4, 0, 0)])
def test_what_fails_on_most_cards_is_nobodys_fault(
    broken: int, whole: int, blamed: int, regime: str, tmp_path: Path
) -> None:
    for i, name in enumerate(names(broken + whole)):
        bad = i < broken
        extra = [failed(CASES[0], ECC, regime)] if bad and regime else []
        card(tmp_path, name, fails=ECC if bad and not regime else "", extra=extra)
    (group,) = judged(tmp_path)
    assert [o.kind for o in group.outliers] == ["fails"] * blamed


def test_a_failure_is_forgotten_once_its_case_has_run(tmp_path: Path) -> None:
    for night in ("first", "second"):
        for name in (*names(4), "beef"):
            card(tmp_path / night, name, fails=ECC if (night, name) == ("first", "beef") else "")
    (group,) = judged(tmp_path)
    assert not group.outliers


def test_a_card_without_a_measurement_in_common_is_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in names(4):
        card(tmp_path, name)
    write_run(
        tmp_path / "beef", [[time(LONG, "bf16_eager", 99.0)]], run_id="beef", sweep="fleet", env=env("beef")
    )
    assert main(["fleet", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "judged by times 4 of 5, by results 4; not by times: beefbeef@01234567\n" in said


def test_what_was_skipped_does_not_replace_what_was_measured(tmp_path: Path) -> None:
    """A second night whose time ran out before the case of the slow card."""
    for name in names(4):
        card(tmp_path, name)
    card(tmp_path, "beef", slow=1.5)
    late = [failed(case, "time budget of 1 s was spent") for case in CASES]
    skipped = [[replace(r, status="skipped") for r in rows] for rows in late]
    write_run(tmp_path / "late", skipped, run_id="late", sweep="fleet", env=env("beef"))
    (group,) = judged(tmp_path)
    assert [(o.card[:4], o.kind) for o in group.outliers] == [("beef", "slow")]


def test_json_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in names(4):
        card(tmp_path, name)
    card(tmp_path, "beef", slow=1.5)
    assert main(["fleet", str(tmp_path), "json=true"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [o["card"][:4] for o in found["outliers"]] == ["beef"]
    assert len(found["groups"][0]["cards"]) == 5


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing/here"],
        [".", "tolerance=0"],
        [".", "tolerance=x"],
        [".", "--fast"],
        [".", "speed=1"],
        ["."],
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fleet", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_it_needs_no_torch(tmp_path: Path) -> None:
    card(tmp_path, "aaaa")
    code = (
        "import sys; from harness.__main__ import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "fleet", str(tmp_path)]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "can't tell" in done.stdout


@pytest.mark.slow
def test_real_runs_of_three_hosts_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of sweep=fleet on this CPU under three invented host names; their checksums are real and agree."""
    monkeypatch.chdir(tmp_path)
    quick = ["rounds=3", "timing.min_seconds=0", "timing.min_samples=1", "timing.max_seconds=0.05"]
    for host in ("one", "two", "three"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        words = [
            "sweep=fleet",
            "device=cpu",
            "timing.warmup_min_seconds=0",
            "parts.ceilings.axes.what=[copy]",
            *quick,
        ]
        assert main([*words, f"run_id={host}", "--quiet"]) == 0
    capsys.readouterr()
    (group,) = judged(tmp_path / "results")
    assert len(group.cards) == 3
    assert group.checked == 6
    assert not [
        o for o in group.outliers if o.kind != "slow" and o.kind != "fast"
    ]  # times are a shared CPU's
    assert main(["fleet", "one", "two", "three", "tolerance=99"]) in (0, 1)
    assert "6 results compared bit by bit: all cards gave the same bits" in capsys.readouterr().out
