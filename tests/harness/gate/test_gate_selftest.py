"""Oracle: counts of sessions whose verdicts are known, and Clopper-Pearson's published figure for 0 of 3."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from gate_fixtures import Times, control_row, time_row, write

from harness.__main__ import main
from harness.gate import error_rates, selftest, simulate, stored_sessions
from harness.gate.policy import load_policy
from harness.gate.simulate import NOISES, grid
from harness.store.errors import UsageError

POLICY = load_policy()


@pytest.fixture
def sittings(tmp_path: Path) -> Path:
    """Three sittings of nothing, and two in which one side was slowed by a tenth."""
    for index, pad in enumerate((0.0, 0.0, 0.0, 0.1, 0.1)):
        times = Times(seed=index)
        name = f"S{index}"
        for side, factor in (("baseline", 1.0), ("candidate", 1.0 + pad)):
            rows = [time_row(1, times(factor)), time_row(2, times(factor)), control_row(times())]
            extra = {"pad": pad} if side == "candidate" and pad else {}
            extra |= {"load_average": 2.5, "rounds": 13 if index == 4 else 7}
            write(tmp_path / "sittings" / name / side, rows, session=name, seconds=50.0, **extra)
            if pad:
                write(
                    tmp_path / "sittings" / name / side,
                    rows[:2],
                    session=name,
                    stage=2,
                    seconds=30.0,
                    **extra,
                )
    return tmp_path / "sittings"


def test_sittings_are_counted_by_what_was_put_in(sittings: Path) -> None:
    found = stored_sessions.read_sittings(sittings, POLICY)
    assert [(s.pad, s.regressed) for s in found] == [(0.0, False)] * 3 + [(0.1, True)] * 2
    lines = stored_sessions.sitting_lines(found)
    assert any(line.startswith("| none (A/A) | 3 | 0 | 0.0% to 70.8% | 0 | 0 | 6 |") for line in lines)
    assert any(line.startswith("| 10% | 2 | 2 | 15.8% to 100.0% | 0 | 4 | 0 |") for line in lines)
    assert any(line.endswith("| 80, 80 | 10, 7 | 2.5, 2.5 |") for line in lines)


def test_planted_slowdowns_are_shown_as_they_were_measured(sittings: Path) -> None:
    """Oracle: one time a round, slowed by 1.1 in both sittings; with one sample its quantile is its median."""
    lines = stored_sessions.planted_lines(stored_sessions.read_sittings(sittings, POLICY))
    rows = [line.split(" | ") for line in lines if line.startswith("| 10% | gemm, ")]
    assert len(rows) == 2
    for _, _, ratio, span, fast, fast_span in rows:
        assert float(ratio) == pytest.approx(1.1, abs=0.02)
        low, high = map(float, span.split(" to "))
        assert low <= float(ratio) <= high
        assert float(fast) == pytest.approx(1.1, abs=0.02)
        assert fast_span.endswith(" |")
    assert stored_sessions.planted_lines(stored_sessions.read_sittings(sittings, POLICY)[:3]) == []


def test_the_fastest_calls_of_a_round_are_compared_with_those_of_its_pair() -> None:
    """Eleven calls a round of 1 ms, one a little faster: the 10 % quantile is the second; interrupted calls don't count."""
    calm = [0.5, *[1.0] * 10]
    interrupted = [0.5, *[1.2] * 4, *[9.0] * 6]
    rows = tuple(
        [SimpleNamespace(samples=[*one, *one], rounds=[0] * 11 + [1] * 11)] for one in (calm, interrupted)
    )
    unit = SimpleNamespace(rows=rows)
    assert stored_sessions._ratio_of_fast(unit) == pytest.approx(1.2)


def test_shuffled_labels_alarm_as_often_as_alpha_says(sittings: Path) -> None:
    """Against zero, both directions at 0.05 each: 10 % are due, less what a discrete test gives away."""
    (line,) = [
        x for x in stored_sessions.shuffle_lines(stored_sessions.read_sittings(sittings, POLICY), POLICY) if x
    ]
    assert "120 relabelled units" in line
    assert "0 (0.00% to 3.03%) against the tolerance" in line
    flagged = int(line.split("tolerance, ")[1].split()[0])
    assert 1 <= flagged <= 30


def test_intervals_of_equal_code_are_held_against_the_truth(sittings: Path) -> None:
    found = stored_sessions.read_sittings(sittings, POLICY)
    (line,) = [x for x in stored_sessions.coverage_lines(found) if x]
    timed = [f for s in found[:3] for f in s.judgement.findings]
    held = sum(f.low <= 1 <= f.high for f in timed)
    assert f"{held} of 6 95 % intervals hold 1" in line
    assert "3 of 3 99 % intervals of the control (29.24% to 100.00%)" in line
    assert stored_sessions.coverage_lines(found[3:]) == []


def test_sittings_set_against_one_another_are_stored_runs(sittings: Path) -> None:
    """Three A/A sittings make six ordered pairs; their machines' drifts differ by 10 % a round, so none is certain."""
    (line,) = [
        x for x in stored_sessions.stored_lines(stored_sessions.read_sittings(sittings, POLICY), POLICY) if x
    ]
    assert "6 comparisons of 3 sittings" in line
    assert "0 called something REGRESSED (0.0%)" in line
    assert stored_sessions.stored_lines([], POLICY) == []


def test_the_table_holds_every_cell() -> None:
    cells = grid(POLICY, 100, 0, NOISES[:2], (6, 10))
    lines = selftest.simulation_lines(cells, simulate.bars(cells), 100, POLICY)
    assert [line.split(" | ")[:2] for line in lines if line.startswith(("| Gaussian", "| heavy"))] == [
        [f"| {name}", rounds] for name in ("Gaussian", "heavy tail") for rounds in ("6", "10")
    ]


def test_the_command_prints_and_stores_the_table(
    sittings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = grid(POLICY, 100, 0, NOISES[:1], (10,))
    monkeypatch.setattr(selftest, "grid", lambda *_: small)
    few = error_rates.rates(POLICY, 2, 0, NOISES[:1])
    monkeypatch.setattr(selftest, "rates", lambda *_: few)
    words = ["gate-selftest", "--sessions", str(sittings), "--results-dir", str(tmp_path / "r")]
    assert main(words) == 0
    out = capsys.readouterr().out
    (stored,) = (tmp_path / "r" / "gate-selftest").iterdir()
    assert out.startswith((stored / "selftest.md").read_text().rstrip("\n"))
    document = json.loads((stored / "selftest.json").read_text())
    assert len(document["cells"]) == len(small)
    assert {(r["mode"], r["rule"]) for r in document["rates"]} == {
        (mode, rule) for mode in error_rates.MODES for rule in error_rates.RULES
    }
    assert [s["pad"] for s in document["sittings"]] == [0.0, 0.0, 0.0, 0.1, 0.1]


def test_a_missed_bar_is_exit_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy whose level no eight rounds reach is blind, which is a broken promise too."""
    blind = tmp_path / "p.yaml"
    blind.write_text("alpha_confirm: 1.0e-12\n")
    cells = grid(POLICY, 100, 0, NOISES[:1], (10,))
    few = error_rates.rates(POLICY, 1, 0, NOISES[:1])
    monkeypatch.setattr(selftest, "grid", lambda *_: cells)
    monkeypatch.setattr(selftest, "rates", lambda *_: few)
    words = ["gate-selftest", "--judgements", "100", "--results-dir", str(tmp_path)]
    assert main(words) == 0
    assert main([*words, "--policy", str(blind)]) == 1


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("trials", "judgements"):
        for few in ("5", "99"):  # one judgement a noise would "hold" a bar of 1 %
            assert main(["gate-selftest", f"--{name}", few, "--results-dir", str(tmp_path / "r")]) == 2
            assert f"--{name} {few}: fewer than 100 {name}" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
    with pytest.raises(UsageError, match="no session in"):
        stored_sessions.read_sittings(tmp_path, POLICY)
