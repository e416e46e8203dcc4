"""Oracle: what a gate must and must not say, case by case; the tools that get each of them wrong are named."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import pytest
from gate_fixtures import (
    POLICY,
    TODAY,
    Rows,
    Times,
    case,
    control_row,
    run,
    slowed,
    time_row,
    value_row,
    verdict,
)

from harness.gate import render
from harness.gate.options import Exit
from harness.gate.policy import Allowance, Match, Policy

INF = float("inf")
NOISY = Times(0.2, seed=3)


def policy_with(**keys: Any) -> Policy:
    return dataclasses.replace(POLICY, **keys)


def units(slow: float, count: int = 10, **times: Any) -> tuple[Rows, Rows]:
    """So many units, of which the candidate's fifth is slower."""
    draw = Times(**times)
    return tuple([time_row(n, draw(f if n == 4 else 1.0)) for n in range(count)] for f in (1.0, slow))


def test_swapped_arguments_mirror_a_confirmed_verdict(tmp_path: Path) -> None:
    """Exit 1; nvbench-compare exits 0 when regressions were found."""
    before, after = slowed(1.10)
    again = slowed(1.10, seed=1)
    one = run(tmp_path / "1", before, after, confirm=again)
    other = run(tmp_path / "2", after, before, confirm=again[::-1])
    assert (verdict(one), one.code) == ("REGRESSED", Exit.REGRESSED)
    assert (verdict(other), other.code) == ("IMPROVED", Exit.OK)
    a, b = one.findings[0], other.findings[0]
    assert a.change == pytest.approx(1.10, abs=0.01)
    assert (a.change * b.change, a.low * b.high) == pytest.approx((1, 1))
    assert (a.decision.p, a.decision.p_confirm) == (b.decision.p, b.decision.p_confirm)


def test_what_fresh_data_do_not_confirm_is_not_regressed(tmp_path: Path) -> None:
    judgement = run(tmp_path, *slowed(1.06), confirm=slowed(1.0, seed=1))
    assert verdict(judgement) == "INCONCLUSIVE"
    assert judgement.findings[0].rounds == 20  # retries add data, they do not replace it
    assert judgement.to_confirm == (case(1).case_id,)


@pytest.mark.parametrize(
    ("control", "after", "code"),
    [(NOISY(), NOISY(1.03), Exit.OK), ([1.0] * 10, [INF] * 10, Exit.INVALID)],
    ids=["only noisy", "no time"],
)
def test_a_control_invalidates_the_run_by_more_than_its_own_noise(
    tmp_path: Path, control: list[float], after: list[float], code: Exit
) -> None:
    times = Times()
    judgement = run(
        tmp_path, [time_row(1, times()), control_row(control)], [time_row(1, times()), control_row(after)]
    )
    assert (judgement.code, judgement.control.moved) == (code, code is Exit.INVALID)


@pytest.mark.parametrize("broken", [0, 1])
def test_where_the_control_failed_no_time_is_judged(tmp_path: Path, broken: int) -> None:
    times = Times()
    sides = [[time_row(1, times()), control_row(times())] for _ in range(2)]
    assert run(tmp_path / "sound", *sides).code is Exit.OK
    sides[broken][1] = dataclasses.replace(
        sides[broken][1], status="failed", reason="lost", samples=(), rounds=()
    )
    assert run(tmp_path / "lost", *sides).code is Exit.INVALID


def test_numerics_are_exact_and_speak_first(tmp_path: Path) -> None:
    times = Times()
    before = [time_row(1, times()), value_row(1, "sqnr_db", 28.5), control_row(times())]
    after = [time_row(1, times(1.2)), value_row(1, "sqnr_db", 22.5), control_row(times(1.2))]
    judgement = run(tmp_path, before, after)
    assert judgement.code is Exit.NUMERICS
    finding = next(f for f in judgement.findings if f.key.metric == "sqnr_db")
    assert "28.5 -> 22.5 dB" in finding.reason
    cause = next(f for f in judgement.findings if f.key.metric == "time_ms").cause
    assert cause is not None
    assert cause.name == "control"


@pytest.mark.parametrize(
    ("metric", "before", "after", "expected"),
    [
        ("sqnr_db", 28.5, 28.46, "OK"),  # within 0.05 dB
        ("sqnr_db", 28.5, 28.4, "REGRESSED"),
        ("sqnr_db", 28.5, 30.0, "IMPROVED"),
        ("sqnr_db", INF, 60.0, "REGRESSED"),
        ("sqnr_db", INF, INF, "OK"),
        ("sqnr_db", 60.0, INF, "IMPROVED"),
        ("mismatches", 0.0, 1.0, "REGRESSED"),
        ("underflow_frac", 0.0, 0.0, "OK"),
        ("rel_err_max", 0.1, INF, "REGRESSED"),
        ("saved_bytes_per_elem", 4.0, 4.0001, "REGRESSED"),  # memory: 0 %
        ("saved_bytes_per_elem", 4.0, 3.0, "IMPROVED"),
    ],
)
def test_exact_rules(tmp_path: Path, metric: str, before: float, after: float, expected: str) -> None:
    frozen = time_row(1, Times()())
    rows = [[frozen, value_row(1, metric, before)], [frozen, value_row(1, metric, after)]]
    found = {f.key.metric: str(f.verdict) for f in run(tmp_path, *rows).findings}
    assert found[metric] == expected


def test_two_stored_runs_are_not_pairs(tmp_path: Path) -> None:
    """4 % slower is more than the tolerance of 3 %, and less than the tolerance and what sessions differ by."""
    times = Times(0.001)
    sides = [[time_row(n, times(factor)) for n in range(10)] for factor in (1.0, 1.045)]
    paired, stored = run(tmp_path / "1", *sides), run(tmp_path / "2", *sides, session="")
    assert (paired.mode, stored.mode) == ("paired", "stored")
    assert (paired.counted, stored.counted) == ({"REGRESSED": 10}, {"OK": 10})
    few = run(tmp_path / "3", *slowed(1.045, spread=0.001), session="")  # which show no scatter of processes
    assert (verdict(few), few.code) == ("INCONCLUSIVE", Exit.INCONCLUSIVE)
    assert "measure both together (--against)" in few.findings[0].reason
    assert any("no control case" in note for note in stored.notes)


@pytest.mark.parametrize(("days", "code"), [(0, Exit.OK), (-1, Exit.REGRESSED)])
def test_an_allowance_holds_until_its_date(tmp_path: Path, days: int, code: Exit) -> None:
    match = Match(suite="gemm", arm="fp8")
    allowance = Allowance(match, TODAY + datetime.timedelta(days), "known, ticket 12")
    found = run(tmp_path, *slowed(1.2), policy=policy_with(allow=(allowance,)))
    assert (verdict(found), found.code) == ("REGRESSED", code)
    assert any("ended on 2027-01-14: known, ticket 12" in note for note in found.notes) is (days < 0)


@pytest.mark.parametrize(("rounds", "exact", "code"), [(10, True, 0), (2, True, 0), (2, False, 6)])
def test_of_exact_rules_alone_no_time_was_judged_and_of_nothing_nothing_passes(
    tmp_path: Path, rounds: int, exact: bool, code: int
) -> None:
    """Machine-free: one ratio in two rounds and no exact rule was "OK, no time judged, 1 undecided (exit 0)"."""
    times = Times(rounds=rounds)
    rows = [time_row(1, times(), arm) for arm in ("bf16", "fp8")] + [value_row(1, "sqnr_db", 28.5)] * exact
    found = run(tmp_path, rows, rows, machine_free=True)
    assert int(found.code) == code
    assert render.headline(found).startswith("COULD NOT JUDGE 1 of 1" if code else "OK, no time judged")


@pytest.mark.parametrize("rounds", [3, 5, 7])
def test_a_slowdown_in_too_few_rounds_is_never_ok(tmp_path: Path, rounds: int) -> None:
    """Paired rounds: one of ten units 10 times slower, below the share that may stay open."""
    before, after = units(10.0, spread=0.001, rounds=rounds)
    found = run(tmp_path / "1", before, after)
    assert render.headline(found).startswith("COULD NOT JUDGE 1 of 10, 1 of them looks slower: gemm ")
    assert [f.key.case_id for f in found.suspects] == [case(4).case_id]
    assert found.suspects[0].change == pytest.approx(10, rel=0.02)
    match = Match(case=found.suspects[0].case)
    for name, policy, code in (
        ("default", {}, 6),
        ("warn", {"on_inconclusive": "warn"}, 6),  # a policy may put up with what is open, not with this
        ("share", {"undecided_share": 0.9}, 6),
        ("told", {"on_slower": "warn"}, 0),
        ("allowed", {"allow": (Allowance(match, TODAY, "known"),)}, 0),
    ):
        assert int(run(tmp_path / name, before, after, policy=policy_with(**policy)).code) == code, name
    assert run(tmp_path / "mirror", after, before).code is Exit.OK  # faster is no fault


def test_what_was_flagged_and_not_measured_again_is_never_ok(tmp_path: Path) -> None:
    """Six rounds flag one of ten units; the time allowed holds no confirmation, or one of four rounds."""
    before, after = units(1.1, rounds=6)
    fresh = Times(seed=1, rounds=4)
    assert run(tmp_path / "none", before, after).code is Exit.INCONCLUSIVE
    found = run(tmp_path / "four", before, after, confirm=([time_row(4, fresh())], [time_row(4, fresh(1.1))]))
    assert (found.code, len(found.suspects)) == (Exit.INCONCLUSIVE, 1)
    assert run(tmp_path / "twin", *units(1.0, rounds=6)).code is Exit.OK
