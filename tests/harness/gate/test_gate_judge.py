"""Oracle: what a gate must and must not say, case by case; the tools that get each of them wrong are named."""

from __future__ import annotations

import dataclasses
import datetime
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gate_fixtures import (
    ENV,
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
    write,
)

from harness.gate import render
from harness.gate.decide import Verdict
from harness.gate.exit_code import Exit, GateError
from harness.gate.judge import Judgement, judge
from harness.gate.policy import Allowance, Group, Match, Policy
from harness.gate.sides import load_side


def test_a_confirmed_slowdown_is_regressed_and_exit_1(tmp_path: Path) -> None:
    """nvbench-compare exits 0 when regressions were found."""
    judgement = run(tmp_path, *slowed(1.10), confirm=slowed(1.10, seed=1))
    assert verdict(judgement) == "REGRESSED"
    assert judgement.code is Exit.REGRESSED
    assert judgement.findings[0].change == pytest.approx(1.10, abs=0.01)


def test_swapped_arguments_mirror_the_verdict(tmp_path: Path) -> None:
    before, after = slowed(1.10)
    again = slowed(1.10, seed=1)
    one = run(tmp_path / "1", before, after, confirm=again)
    other = run(tmp_path / "2", after, before, confirm=again[::-1])
    assert (verdict(one), verdict(other)) == ("REGRESSED", "IMPROVED")
    a, b = one.findings[0], other.findings[0]
    assert (a.change * b.change, a.low * b.high) == pytest.approx((1, 1))
    assert (a.p, a.p_confirm) == (b.p, b.p_confirm)
    assert other.code is Exit.OK


def test_equal_sides_are_ok(tmp_path: Path) -> None:
    judgement = run(tmp_path, *slowed(1.0))
    assert verdict(judgement) == "OK"
    assert judgement.code is Exit.OK
    assert judgement.to_confirm == ()


def test_what_fresh_data_do_not_confirm_is_not_regressed(tmp_path: Path) -> None:
    judgement = run(tmp_path, *slowed(1.06), confirm=slowed(1.0, seed=1))
    assert verdict(judgement) == "INCONCLUSIVE"
    assert "10 fresh rounds did not confirm it (p 1)" in judgement.findings[0].reason
    assert judgement.findings[0].rounds == 20  # retries add data, they do not replace it
    assert judgement.to_confirm == (case(1).case_id,)


def test_a_noisy_machine_is_inconclusive_and_says_how_many_rounds_would_settle_it(tmp_path: Path) -> None:
    judgement = run(tmp_path, *slowed(1.0, spread=0.08))
    assert verdict(judgement) == "INCONCLUSIVE"
    assert judgement.code is Exit.INCONCLUSIVE
    more = judgement.findings[0].more
    assert more is not None
    assert f"about {more} more rounds" in judgement.findings[0].reason
    warn = dataclasses.replace(POLICY, on_inconclusive="warn")
    assert run(tmp_path / "warn", *slowed(1.0, spread=0.08), policy=warn).code is Exit.OK


def test_that_many_more_rounds_do_settle_it(tmp_path: Path) -> None:
    """With spread and change as they are, the rounds it asks for turn INCONCLUSIVE into OK, with room for luck."""
    spread = 0.05
    first = run(tmp_path / "1", *slowed(1.0, spread=spread)).findings[0]
    assert first.more is not None
    times = Times(spread, rounds=4 * (first.rounds + first.more))
    rows = [time_row(1, times())], [time_row(1, times())]
    assert verdict(run(tmp_path / "2", *rows)) == "OK"


def test_one_slower_unit_of_forty_is_found_without_a_confirmation(tmp_path: Path) -> None:
    """A sign-flip test of 10 rounds ends at 40 / 1024 by Holm, above 0.01, and found nothing however slow it was."""
    times = Times()
    before = [time_row(n, times()) for n in range(40)]
    after = [time_row(n, times(1.2 if n == 7 else 1.0)) for n in range(40)]
    judgement = run(tmp_path, before, after)
    assert judgement.counted["REGRESSED"] == 1
    assert judgement.to_confirm == (case(7).case_id,)


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_statistic_that_fails_is_not_significant(tmp_path: Path, rounds: int) -> None:
    """pyperf counts a failed statistic as significant."""
    times = Times(rounds=max(rounds, 1))
    before = time_row(1, times())
    after = time_row(1, times(5.0))
    if rounds == 0:  # no round in common
        after = dataclasses.replace(after, rounds=(99,))
    judgement = run(tmp_path, [before], [after])
    assert verdict(judgement) == "INCONCLUSIVE"
    assert "a verdict needs at least 3" in judgement.findings[0].reason


def test_a_control_that_moved_invalidates_every_time(tmp_path: Path) -> None:
    """A throttled GPU: everything is 10 % slower, the fixed product of PyTorch too."""
    times = Times()
    before = [time_row(1, times()), control_row(times())]
    after = [time_row(1, times(1.1)), control_row(times(1.1))]
    judgement = run(tmp_path, before, after)
    assert judgement.code is Exit.INVALID
    assert verdict(judgement) == "INCONCLUSIVE"
    cause = judgement.findings[0].cause
    assert cause is not None
    assert cause.name == "control"
    swapped = run(tmp_path / "2", after, before)
    assert swapped.code is Exit.INVALID


def test_a_control_that_is_only_noisy_invalidates_nothing(tmp_path: Path) -> None:
    noisy = Times(0.2, seed=3)
    times = Times()
    before = [time_row(1, times()), control_row(noisy())]
    judgement = run(tmp_path, before, [time_row(1, times()), control_row(noisy(1.03))])
    assert abs(judgement.control.change - 1) > POLICY.control
    assert not judgement.control.moved
    assert judgement.code is Exit.OK


def test_numerics_are_exact_and_speak_first(tmp_path: Path) -> None:
    times = Times()
    before = [time_row(1, times()), value_row(1, "sqnr_db", 28.5), control_row(times())]
    after = [time_row(1, times(1.2)), value_row(1, "sqnr_db", 22.5), control_row(times(1.2))]
    judgement = run(tmp_path, before, after)
    assert judgement.code is Exit.NUMERICS
    finding = next(f for f in judgement.findings if f.unit.metric == "sqnr_db")
    assert finding.verdict is Verdict.REGRESSED
    assert "28.5 -> 22.5 dB" in finding.reason


@pytest.mark.parametrize(
    ("metric", "before", "after", "expected"),
    [
        ("sqnr_db", 28.5, 28.46, "OK"),  # within 0.05 dB
        ("sqnr_db", 28.5, 28.4, "REGRESSED"),
        ("sqnr_db", 28.5, 30.0, "IMPROVED"),
        ("sqnr_db", float("inf"), 60.0, "REGRESSED"),
        ("sqnr_db", float("inf"), float("inf"), "OK"),
        ("sqnr_db", 60.0, float("inf"), "IMPROVED"),
        ("mismatches", 0.0, 1.0, "REGRESSED"),
        ("underflow_frac", 0.0, 0.0, "OK"),
        ("rel_err_max", 0.1, float("inf"), "REGRESSED"),
        ("saved_bytes_per_elem", 4.0, 4.0001, "REGRESSED"),  # memory: 0 %
        ("saved_bytes_per_elem", 4.0, 3.0, "IMPROVED"),
    ],
)
def test_exact_rules(tmp_path: Path, metric: str, before: float, after: float, expected: str) -> None:
    times = Times()
    frozen = time_row(1, times())
    rows = [[frozen, value_row(1, metric, before)], [frozen, value_row(1, metric, after)]]
    found = {f.unit.metric: str(f.verdict) for f in run(tmp_path, *rows).findings}
    assert found[metric] == expected


def test_where_slower_only_warns_numerics_and_lost_cases_still_fail(tmp_path: Path) -> None:
    warn = dataclasses.replace(POLICY, on_slower="warn")
    before, after = slowed(1.2)
    again = slowed(1.2, seed=1)
    slower = run(tmp_path / "1", before, after, confirm=again, policy=warn)
    assert (verdict(slower), slower.code) == ("REGRESSED", Exit.OK)
    worse = [*before, value_row(1, "sqnr_db", 28.5)], [*after, value_row(1, "sqnr_db", 20.0)]
    assert run(tmp_path / "2", *worse, policy=warn).code is Exit.NUMERICS
    assert run(tmp_path / "3", [*before, time_row(2, Times()())], after, policy=warn).code is Exit.REGRESSED


def test_a_control_without_a_time_invalidates_the_run(tmp_path: Path) -> None:
    rows = [[time_row(1, Times()()), control_row([t] * 10)] for t in (1.0, float("inf"))]
    judgement = run(tmp_path, *rows)
    assert judgement.code is Exit.INVALID
    assert "has an invalid time" in judgement.control.reason


def test_different_power_limit_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"power_limit_w: 700.0 != 350.0") as caught:
        run(tmp_path, *slowed(1.0), envs=(ENV, {**ENV, "power_limit_w": 350.0}))
    assert caught.value.code is Exit.INVALID


def test_a_commit_or_a_host_is_no_difference(tmp_path: Path) -> None:
    other = {**ENV, "git_commit": "f" * 40, "host_hash": "else", "numpy": "9"}
    assert run(tmp_path, *slowed(1.0), envs=(ENV, other)).code is Exit.OK


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


def test_an_allowance_holds_until_its_date(tmp_path: Path) -> None:
    def allowing(until: datetime.date) -> Policy:
        allowance = Allowance(Match((("suite", "gemm"), ("arm", "fp8"))), until, "known, ticket 12")
        return dataclasses.replace(POLICY, allow=(allowance,))

    times = Times()
    rows = [time_row(1, times())], [time_row(1, times(1.2))]
    held = run(tmp_path / "1", *rows, policy=allowing(TODAY))
    assert (verdict(held), held.code) == ("REGRESSED", Exit.OK)
    ended = run(tmp_path / "2", *rows, policy=allowing(TODAY - datetime.timedelta(1)))
    assert (verdict(ended), ended.code) == ("REGRESSED", Exit.REGRESSED)
    assert any("ended on 2027-01-14: known, ticket 12" in note for note in ended.notes)


def test_a_group_has_its_own_tolerance(tmp_path: Path) -> None:
    wide = dataclasses.replace(POLICY, groups=(Group("g", Match((("arm", "f*8"),)), tolerance=0.25),))
    assert verdict(run(tmp_path, *slowed(1.2), policy=wide)) == "OK"


def test_a_group_sees_what_no_member_shows(tmp_path: Path) -> None:
    """Every one of 30 cases 5 % slower under noise that hides it in each: their mean shows it."""
    policy = dataclasses.replace(
        POLICY, groups=(Group("all gemms", Match((("suite", "gemm"),)), together=True),)
    )
    first, again = Times(0.05), Times(0.05, seed=1, rounds=16)  # Holm over what is flagged costs some rounds

    def rows(times: Times, factor: float) -> Rows:
        return [time_row(n, times(factor)) for n in range(30)]

    confirm = rows(again, 1), rows(again, 1.05)
    judgement = run(tmp_path, rows(first, 1), rows(first, 1.05), policy=policy, confirm=confirm)
    group = judgement.findings[30]
    assert group.unit.suite == "group"
    assert group.verdict is Verdict.REGRESSED
    assert judgement.counted["REGRESSED"] < 15
    assert set(judgement.to_confirm) == {case(n).case_id for n in range(30)}


def test_a_time_that_is_none_is_no_pass(tmp_path: Path) -> None:
    times = Times()
    judgement = run(tmp_path, [time_row(1, times())], [time_row(1, [0.0] * 10)])
    assert judgement.findings[0].verdict is Verdict.REGRESSED
    assert "sample of round 0 is 0 ms, which is no time" in judgement.findings[0].reason
    endless = run(tmp_path / "2", [time_row(1, times())], [time_row(1, [float("inf")] * 10)])
    assert endless.findings[0].verdict is Verdict.REGRESSED


def test_judging_is_pure_and_needs_no_torch(tmp_path: Path) -> None:
    before, after = slowed(1.1)
    write(tmp_path / "a", before)
    write(tmp_path / "b", after)
    state = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    code = (
        "import sys; from harness.__main__ import main;"
        f"code = main(['gate', '--baseline', {str(tmp_path / 'a')!r}, '--candidate', {str(tmp_path / 'b')!r}]);"
        "assert code == 1, code; assert not {'torch', 'triton', 'fp8core'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == state


def open_units(tmp: Path, noisy: int, quiet: int, **policy: object) -> Judgement:
    """Equal sides; so many units are too noisy to be decided."""
    times, back_and_forth = Times(), ([1.0, 2.0] * 5, [2.0, 1.0] * 5)
    sides = [
        [time_row(n, wild if n < noisy else times()) for n in range(noisy + quiet)] for wild in back_and_forth
    ]
    return run(tmp, *sides, policy=dataclasses.replace(POLICY, **policy))


@pytest.mark.parametrize(
    ("noisy", "quiet", "code"), [(12, 38, Exit.INCONCLUSIVE), (8, 0, Exit.INCONCLUSIVE), (2, 38, Exit.OK)]
)
def test_silence_about_the_times_is_no_ok(tmp_path: Path, noisy: int, quiet: int, code: Exit) -> None:
    """Undecided: 12 of 50, all of 8, and 2 of 40, which is a share that may stay open."""
    found = open_units(tmp_path, noisy, quiet)
    assert found.code is code
    said = render.headline(found)
    assert said == (
        f"OK, {noisy} undecided" if code is Exit.OK else f"COULD NOT JUDGE {noisy} of {noisy + quiet}"
    )


def test_a_policy_may_tell_only_and_the_headline_still_says_so(tmp_path: Path) -> None:
    found = open_units(tmp_path, 8, 0, on_inconclusive="warn")
    assert (found.code, render.headline(found)) == (Exit.OK, "COULD NOT JUDGE 8 of 8")
    assert open_units(tmp_path / "2", 20, 30, undecided_share=0.5).code is Exit.OK
    assert open_units(tmp_path / "3", 1, 39, on_inconclusive="fail").code is Exit.INCONCLUSIVE


def test_exact_rules_alone_say_that_no_time_was_judged(tmp_path: Path) -> None:
    rows = [time_row(1, Times()()), value_row(1, "sqnr_db", 28.5)]
    found = run(tmp_path, rows, rows, machine_free=True)
    assert (found.code, render.headline(found)) == (Exit.OK, "OK, no time judged")


@pytest.mark.parametrize("rounds", [8, 12])
def test_fifty_stored_units_ten_times_slower_are_regressed(tmp_path: Path, rounds: int) -> None:
    """Through the store: a sign-flip test of 8 rounds, corrected for 50 units, can find none of them."""
    times = Times(0.01, rounds=rounds)
    before, after = ([time_row(n, times(f)) for n in range(50)] for f in (1.0, 10.0))
    found = run(tmp_path, before, after, session="")
    assert (found.counted["REGRESSED"], found.code) == (50, Exit.REGRESSED)
    twin = run(tmp_path / "equal", before, [time_row(n, times()) for n in range(50)], session="")
    assert (twin.counted["REGRESSED"], twin.code) == (0, Exit.OK)


@pytest.mark.parametrize("rounds", [3, 5, 7])
def test_a_slowdown_in_too_few_rounds_is_never_ok(tmp_path: Path, rounds: int) -> None:
    """Paired rounds: one of ten units 10 times slower, below the share that may stay open."""
    times = Times(0.001, rounds=rounds)
    before, after = ([time_row(n, times(slow if n == 4 else 1.0)) for n in range(10)] for slow in (1.0, 10.0))
    found = run(tmp_path / "1", before, after)
    assert found.code is Exit.INCONCLUSIVE
    assert render.headline(found).startswith("COULD NOT JUDGE 1 of 10, 1 of them looks slower: gemm ")
    assert [f.unit.case_id for f in found.suspects] == [case(4).case_id]
    assert found.suspects[0].change == pytest.approx(10, rel=0.02)
    for name, policy in (
        ("warn", {"on_inconclusive": "warn"}),
        ("share", {"undecided_share": 0.9}),
    ):  # a policy may put up with what is open
        assert run(tmp_path / name, before, after, policy=dataclasses.replace(POLICY, **policy)).code == 6
    told = dataclasses.replace(POLICY, on_slower="warn")
    assert run(tmp_path / "told", before, after, policy=told).code is Exit.OK
    assert run(tmp_path / "mirror", after, before).code is Exit.OK  # faster is no fault
    match = Match((("case", found.suspects[0].unit.case),))
    allowing = dataclasses.replace(POLICY, allow=(Allowance(match, TODAY, "known"),))
    assert run(tmp_path / "allowed", before, after, policy=allowing).code is Exit.OK


def test_what_was_flagged_and_not_measured_again_is_never_ok(tmp_path: Path) -> None:
    """Six rounds flag one of ten units; the time allowed holds no confirmation, or one of four rounds."""
    times, fresh = Times(rounds=6), Times(seed=1, rounds=4)
    before, after = ([time_row(n, times(slow if n == 4 else 1.0)) for n in range(10)] for slow in (1.0, 1.1))
    assert run(tmp_path / "none", before, after).code is Exit.INCONCLUSIVE
    again = [time_row(4, fresh())], [time_row(4, fresh(1.1))]
    found = run(tmp_path / "four", before, after, confirm=again)
    assert (found.code, len(found.suspects)) == (Exit.INCONCLUSIVE, 1)
    twin = run(tmp_path / "twin", before, [time_row(n, times()) for n in range(10)])
    assert twin.code is Exit.OK


def test_where_nothing_at_all_was_decided_nothing_passes(tmp_path: Path) -> None:
    """Machine-free: one ratio in two rounds and no exact rule; it was "OK, no time judged, 1 undecided (exit 0)"."""
    times = Times(rounds=2)
    rows = [time_row(1, times(), "bf16"), time_row(1, times(), "fp8")]
    found = run(tmp_path / "1", rows, rows, machine_free=True)
    assert (found.code, render.headline(found)) == (Exit.INCONCLUSIVE, "COULD NOT JUDGE 1 of 1")
    exact = [*rows, value_row(1, "sqnr_db", 28.5)]
    assert run(tmp_path / "2", exact, exact, machine_free=True).code is Exit.OK


def test_a_group_leaves_out_what_is_excluded(tmp_path: Path) -> None:
    """Two of five cases ran beside another process and are 30 % slower; the mean of the five would be 11 % up."""
    policy = dataclasses.replace(POLICY, groups=(Group("g", Match((("suite", "gemm"),)), together=True),))
    times = Times()
    before = [time_row(n, times()) for n in range(5)]
    after = [time_row(n, times(1.3 if n < 2 else 1.0)) for n in range(5)]
    timing = {"method": "cuda_events", "contended": True}
    after = [dataclasses.replace(r, timing=timing) if n < 2 else r for n, r in enumerate(after)]
    found = run(tmp_path, before, after, policy=policy)
    (group,) = [f for f in found.findings if f.unit.suite == "group"]
    assert (group.verdict, group.unit.members) == (
        Verdict.OK,
        tuple(sorted(case(n).case_id for n in (2, 3, 4))),
    )


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    """A copy under another name is the same run too: whatever it holds, it would pass."""
    write(tmp_path / "a", slowed(1.0)[0], session="")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for other in ("a", "b"):
        sides = load_side(tmp_path / "a", "baseline", ""), load_side(tmp_path / other, "candidate", "")
        with pytest.raises(GateError, match="hold the same run a-1") as refused:
            judge(*sides, POLICY, today=TODAY)
        assert refused.value.code is Exit.USAGE
