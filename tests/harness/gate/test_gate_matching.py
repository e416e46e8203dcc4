"""Oracle: which rows of two sides belong together, what is judged about them, and that what is lost is no pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from gate_fixtures import (
    ENV,
    POLICY,
    Rows,
    Times,
    case,
    failed_row,
    run,
    time_row,
    value_row,
    write,
)

from harness.gate.decide import Verdict
from harness.gate.exit_code import Exit, GateError
from harness.gate.judge import judge
from harness.gate.policy import Policy
from harness.gate.publish import github_lines, junit
from harness.gate.render import headline, terminal
from harness.gate.sides import load_side
from harness.store.cause import Cause
from harness.store.measurement import Measurement


def test_a_missing_case_is_no_pass(tmp_path: Path) -> None:
    """Tools that join on common names drop what the candidate lost."""
    times = Times()
    before = [time_row(1, times()), time_row(2, times())]
    judgement = run(tmp_path, before, [time_row(1, times())])
    lost = next(f for f in judgement.findings if f.unit.case_id == case(2).case_id)
    assert (lost.verdict, judgement.code) == (Verdict.REGRESSED, Exit.REGRESSED)
    assert "not in the candidate" in lost.reason


def test_a_new_case_is_noted_and_not_judged(tmp_path: Path) -> None:
    times = Times()
    judgement = run(tmp_path, [time_row(1, times())], [time_row(1, times()), time_row(2, times())])
    assert judgement.code is Exit.OK
    assert any("1 cases are new" in note for note in judgement.notes)


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (failed_row(1, "RuntimeError: out of memory"), Exit.REGRESSED),
        (failed_row(1, "needs sm_89", status="skipped"), Exit.REGRESSED),
        (failed_row(1, "sqnr_db 3 below 20", cause=Cause.NUMERICS), Exit.NUMERICS),
    ],
)
def test_a_case_that_no_longer_runs_is_no_pass(tmp_path: Path, row: Measurement, code: Exit) -> None:
    judgement = run(tmp_path, [time_row(1, Times()())], [row])
    assert judgement.code is code
    assert row.reason in judgement.findings[0].reason


@pytest.mark.parametrize(
    ("rows", "policy", "says"),
    [
        (([failed_row(1, "no memory")], [time_row(1, Times()())]), POLICY, "1 arms failed in the baseline"),
        (
            ([time_row(1, Times()())],) * 2,
            dataclasses.replace(POLICY, units={}),
            "the policy ignores every metric",
        ),
    ],
)
def test_where_nothing_can_be_judged_nothing_passes(
    tmp_path: Path, rows: tuple[Rows, Rows], policy: Policy, says: str
) -> None:
    with pytest.raises(GateError, match=says) as caught:
        run(tmp_path, *rows, policy=policy)
    assert caught.value.code is Exit.NO_BASELINE


def test_what_a_row_states_is_judged_where_it_is_equal_too(tmp_path: Path) -> None:
    """A laptop against an H200: no time, no numerics, yet the bytes were compared and are the same."""
    rows = [time_row(1, Times()(), bytes_moved=1e6)]
    other = {**ENV, "gpu": "NVIDIA GeForce RTX 5090"}
    judgement = run(tmp_path, rows, rows, envs=(ENV, other), machine_free=True)
    assert [(f.unit.metric, str(f.verdict)) for f in judgement.findings] == [("bytes_moved", "OK")]


def test_an_arm_that_cannot_be_built_is_lost_and_not_wrong(tmp_path: Path) -> None:
    """A graph break: its SQNR is gone with it, which says nothing about numerics."""
    before = [time_row(1, Times()()), value_row(1, "sqnr_db", 28.5)]
    judgement = run(tmp_path / "1", before, [failed_row(1, "Unsupported: graph break")])
    assert (judgement.counted["REGRESSED"], judgement.code) == (2, Exit.REGRESSED)
    refuted = failed_row(1, "codes differ from the reference cast", cause=Cause.NUMERICS)
    judgement = run(tmp_path / "2", before, [dataclasses.replace(refuted, metric="sqnr_db"), refuted])
    assert (judgement.counted["REGRESSED"], judgement.code) == (2, Exit.NUMERICS)


def test_what_failed_in_the_baseline_is_noted(tmp_path: Path) -> None:
    times = Times()
    before = [time_row(1, times()), failed_row(2, "worker: ended with code 7")]
    judgement = run(tmp_path, before, [time_row(1, times()), time_row(2, times())])
    assert judgement.code is Exit.OK
    assert any("1 arms failed in the baseline" in n and "code 7" in n for n in judgement.notes)


@pytest.mark.parametrize("machine_free", [False, True])
@pytest.mark.parametrize("broken", [1, 2, 9])
def test_arms_that_fail_on_both_sides_are_no_pass(tmp_path: Path, broken: int, machine_free: bool) -> None:
    """Ten arms: more than the policy's fifth may not stay open; one does, and is told."""
    times = Times()
    good = [row for n in range(broken, 10) for row in (time_row(n, times()), value_row(n, "sqnr_db", 30.0))]
    bad = [failed_row(n, f"AttributeError: no prime, {n}") for n in range(broken)]
    found = run(tmp_path, [*good, *bad], [*good, *bad], machine_free=machine_free)
    assert found.code is (Exit.OK if broken <= 2 else Exit.INCONCLUSIVE)
    failed = [f for f in found.findings if f.unit.failed_twice]
    assert {f.verdict for f in failed} == {Verdict.INCONCLUSIVE}
    assert [f.unit.case_id for f in failed] == [case(n).case_id for n in range(broken)]
    assert "no prime, 0" in failed[0].reason
    words = "OK, no time judged" if machine_free else "OK"
    if broken <= 2:
        assert headline(found) == f"{words}, {broken} undecided"
    else:
        assert headline(found).startswith(f"COULD NOT JUDGE {broken} of ")
    (note,) = [n for n in found.notes if n.startswith(f"NOT JUDGED: {broken} arms failed on both sides")]
    assert note in github_lines(found)
    assert junit(found).count('<skipped message="INCONCLUSIVE: failed on both sides') == broken


def test_arms_that_no_side_supports_are_no_failures(tmp_path: Path) -> None:
    rows = [time_row(1, Times()()), *(failed_row(n, "needs sm_89", status="skipped") for n in range(2, 9))]
    found = run(tmp_path, rows, rows)
    assert (found.code, headline(found), found.notes) == (Exit.OK, "OK", ())


def test_an_arm_that_failed_and_is_gone_is_undecided(tmp_path: Path) -> None:
    times = Times()
    good = [time_row(n, times()) for n in range(9)]
    found = run(tmp_path / "1", [*good, failed_row(9, "no memory")], good)
    assert (found.code, found.counted["INCONCLUSIVE"]) == (Exit.OK, 1)
    assert "not in the candidate" in found.findings[-1].reason
    found = run(
        tmp_path / "2", [*good, failed_row(9, "OOM")], [*good, failed_row(9, "too large", status="skipped")]
    )
    assert (found.code, found.counted["INCONCLUSIVE"]) == (Exit.OK, 1)
    assert "skipped: too large" in found.findings[-1].reason


def test_where_every_arm_fails_on_both_sides_there_is_no_verdict(tmp_path: Path) -> None:
    bad = [failed_row(1, "no memory")]
    policy = dataclasses.replace(POLICY, on_inconclusive="warn")
    with pytest.raises(GateError, match=r"no pass: .*1 arms failed on both sides.*no memory") as caught:
        run(tmp_path, bad, bad, policy=policy)
    assert caught.value.code is Exit.NO_BASELINE


def test_a_curve_is_left_to_the_loss_verdict(tmp_path: Path) -> None:
    frozen = time_row(1, Times()())
    curve = dataclasses.replace(value_row(1, "sqnr_db", 30.0), samples=(30.0, 20.0), rounds=(0, 100))
    judgement = run(tmp_path, [frozen, value_row(1, "loss", 3.0), curve], [frozen])
    assert [f.unit.metric for f in judgement.findings] == ["time_ms"]


def test_bytes_and_counts_that_a_row_states_are_judged(tmp_path: Path) -> None:
    times = Times()
    one = time_row(1, times(), bytes_moved=1e6, resolved={"compile_graph_breaks": 0, "operator_calls": 10})
    other = time_row(1, times(), bytes_moved=2e6, resolved={"compile_graph_breaks": 2, "operator_calls": 9})
    judgement = run(tmp_path, [one], [other])
    found = {f.unit.metric: str(f.verdict) for f in judgement.findings}
    assert found == {
        "time_ms": "OK",
        "bytes_moved": "REGRESSED",
        "compile_graph_breaks": "REGRESSED",
        "operator_calls": "IMPROVED",
    }
    assert judgement.code is Exit.REGRESSED


def test_fewer_layers_in_fp8_is_a_regression(tmp_path: Path) -> None:
    """Less is worse for some counts: a layer that silently stays in bf16 may even be faster."""
    times = Times()
    one, other = ([time_row(1, times(), resolved={"fp8_layers": n, "fp8_gemms": 3 * n})] for n in (9, 8))
    judgement = run(tmp_path, one, other)
    found = {f.unit.metric: str(f.verdict) for f in judgement.findings}
    assert found == {"time_ms": "OK", "fp8_layers": "REGRESSED", "fp8_gemms": "REGRESSED"}
    assert judgement.code is Exit.REGRESSED
    assert run(tmp_path / "2", other, one).code is Exit.OK


def test_what_another_machine_skips_is_undecided_and_here_a_regression(tmp_path: Path) -> None:
    rows = [time_row(1, Times()())], [failed_row(1, "torch.compile needs a C++ compiler", status="skipped")]
    here = run(tmp_path / "1", *rows, machine_free=True)
    assert here.code is Exit.REGRESSED
    there = run(tmp_path / "2", *rows, envs=(ENV, {**ENV, "driver": "575"}), machine_free=True)
    assert (there.counted["INCONCLUSIVE"], there.code) == (1, Exit.INCONCLUSIVE)  # nothing was decided
    assert "needs a C++ compiler" in there.findings[0].reason


def test_what_the_candidate_no_longer_states_is_undecided(tmp_path: Path) -> None:
    times = Times()
    one = time_row(1, times(), bytes_moved=1e6, resolved={"operator_calls": 10})
    judgement = run(tmp_path, [one], [time_row(1, times())])
    found = {f.unit.metric: str(f.verdict) for f in judgement.findings}
    assert found == {"time_ms": "OK", "bytes_moved": "INCONCLUSIVE", "operator_calls": "INCONCLUSIVE"}


@pytest.mark.parametrize(
    ("struck", "condition", "decides"),
    [
        ("candidate", "throttled", False),
        ("baseline", "throttled", False),
        ("both", "throttled", True),  # limited by power, the one as the other
        ("candidate", "contended", False),
        ("both", "contended", False),
    ],
)
def test_the_conditions_of_a_measurement_decide(
    tmp_path: Path, struck: str, condition: str, decides: bool
) -> None:
    """20 % slower, and the rows say that the device was throttled or shared."""
    times = Times()
    rows = []
    for side, factor in (("baseline", 1.0), ("candidate", 1.2)):
        timing = {"method": "cuda_events", condition: struck in (side, "both")}
        rows.append([dataclasses.replace(time_row(1, times(factor)), timing=timing)])
    found = run(tmp_path, *rows)
    (finding,) = found.findings
    expected = ("REGRESSED", True) if decides else ("INCONCLUSIVE", False)
    assert (str(finding.verdict), finding.flagged) == expected
    assert int(found.code) == (1 if decides else 6)
    assert finding.change == pytest.approx(1.2, abs=0.02)  # kept, and shown
    assert any(n.startswith("1 times were measured ") for n in found.notes)
    policy = dataclasses.replace(POLICY, exclude=())
    assert int(run(tmp_path / "all", *rows, policy=policy).code) == 1


def test_samples_at_a_stray_clock_are_kept_and_counted(tmp_path: Path) -> None:
    """Ten rounds of five samples, one of them at half the clock of its round; the clock of the rounds wanders freely."""
    wander = [1500.0 + 30.0 * (i // 5) for i in range(50)]
    numbers = tuple(i // 5 for i in range(50))
    same = dataclasses.replace(
        time_row(1, [1.0 + 0.001 * (i % 3) for i in range(50)], clocks=wander), rounds=numbers
    )
    odd = dataclasses.replace(same, sample_clock_mhz=(750.0, *wander[1:]))
    found = run(tmp_path, [same], [odd])
    assert found.findings[0].unit.strayed == 1
    assert "1 samples were taken at another clock than their round" in found.findings[0].reason
    assert any("1 samples were taken at a clock more than 5% from" in n for n in found.notes)
    assert run(tmp_path / "calm", [same], [same]).findings[0].unit.strayed == 0


def test_operator_calls_are_judged_under_one_torch_only(tmp_path: Path) -> None:
    times = Times()
    rows = [
        [time_row(1, times(), resolved={"operator_calls": n}), value_row(1, "rel_err_max", 0.1)]
        for n in (10, 11)
    ]
    assert (
        run(tmp_path / "0", *rows, envs=(ENV, {**ENV, "torch": "2.13.0+cpu"}), machine_free=True).code
        is Exit.REGRESSED
    )
    assert run(tmp_path / "2", *rows, machine_free=True).code is Exit.REGRESSED
    for now in ("2.14", "2.13.1"):  # a patch release too
        judgement = run(tmp_path / now, *rows, envs=(ENV, {**ENV, "torch": now}), machine_free=True)
        assert judgement.code == 0
        by_metric = {f.unit.metric: f for f in judgement.findings}
        assert by_metric["operator_calls"].verdict == "INCONCLUSIVE"  # open, and neither passed nor gone
        (note,) = [
            n for n in judgement.notes if n.startswith("NOT JUDGED: operator_calls of 1 units (gemm/fp8)")
        ]
        assert f"torch 2.13.0 became {now}" in note
        assert "python -m harness gate --measure --machine-free" in note
        assert terminal(judgement).splitlines()[-2] == note
        assert headline(judgement) == "OK, no time judged, 1 undecided"
        assert github_lines(judgement) == f"::warning title=Gate::{note}\n"


def test_exact_counts_ratchet(tmp_path: Path) -> None:
    """An improvement is told to be adopted; once it is the baseline, a return is a regression."""

    def counted(n: int) -> list[Measurement]:
        return [time_row(1, Times()(), resolved={"operator_calls": n}), value_row(1, "rel_err_max", 0.1)]

    better = run(tmp_path / "better", counted(9), counted(8), machine_free=True)
    assert better.code == 0
    assert any("1 exact counts improved; a new baseline holds them" in note for note in better.notes)
    back = run(tmp_path / "back", counted(8), counted(9), machine_free=True)
    assert back.code == 1
    assert not any("improved" in note for note in back.notes)


def test_machine_free_rules_hold_across_machines(tmp_path: Path) -> None:
    """A slow laptop against an H200: its times mean nothing, its SQNR does."""
    laptop = {**ENV, "gpu": "NVIDIA GeForce RTX 5090"}
    times = Times()
    before = [time_row(1, times()), value_row(1, "rel_err_max", 0.1)]
    after = [time_row(1, times(5.0)), value_row(1, "rel_err_max", 0.1)]
    judgement = run(tmp_path, before, after, envs=(ENV, laptop), machine_free=True)
    assert judgement.code is Exit.OK
    assert [f.unit.metric for f in judgement.findings] == ["rel_err_max"]
    assert any("times were not judged" in note for note in judgement.notes)
    worse = [*after[:1], value_row(1, "rel_err_max", 0.2)]
    assert run(tmp_path / "2", before, worse, envs=(ENV, laptop), machine_free=True).code is Exit.NUMERICS


def test_ratios_within_a_run_are_judged_on_one_kind_of_device(tmp_path: Path) -> None:
    """The candidate's machine is 30 % slower throughout; only the FP8 arm lost against bf16."""
    before, after = Times(seed=1), Times(seed=2)
    rows = (
        [time_row(1, before(), "bf16"), time_row(1, before(0.7), "fp8")],
        [time_row(1, after(1.3), "bf16"), time_row(1, after(1.3 * 0.7 * 1.2), "fp8")],
    )
    driver = {**ENV, "driver": "575.1"}
    judgement = run(tmp_path, *rows, envs=(ENV, driver), machine_free=True)
    (finding,) = judgement.findings
    assert (finding.unit.arm, str(finding.verdict)) == ("fp8", "REGRESSED")
    assert (finding.unit.before, finding.unit.after) == pytest.approx((0.7, 0.84), rel=0.01)
    assert finding.change == pytest.approx(1.2, rel=0.01)
    assert run(tmp_path / "2", rows[0], rows[0], envs=(ENV, driver), machine_free=True).code is Exit.OK


def test_ratios_are_not_judged_across_power_limits(tmp_path: Path) -> None:
    """FP8 products draw more power than bf16 ones, so a lower limit takes more from them."""
    times = Times()
    rows = [time_row(1, times(), "bf16"), time_row(1, times(0.7), "fp8"), value_row(1, "sqnr_db", 30.0)]
    envs = ENV, {**ENV, "power_limit_w": 350.0}
    judgement = run(tmp_path, rows, rows, envs=envs, machine_free=True)
    assert [f.unit.metric for f in judgement.findings] == ["sqnr_db"]
    assert any("ratios need one kind of device" in note for note in judgement.notes)


@pytest.mark.parametrize(("again", "expected"), [(1.2, "REGRESSED"), (1.0, "INCONCLUSIVE")])
def test_ratios_are_confirmed_on_fresh_data_of_the_candidate(
    tmp_path: Path, again: float, expected: str
) -> None:
    """The stored baseline has no second stage; the candidate's fresh rounds meet its first."""
    times = Times()

    def rows(factor: float) -> Rows:
        return [time_row(1, times(), "bf16"), time_row(1, times(0.7 * factor), "fp8")]

    before = write(tmp_path / "a", rows(1.0), session="earlier")
    after = write(tmp_path / "b", rows(1.2))
    write(after, rows(again), stage=2)
    found = judge(
        load_side(before, "baseline", ""), load_side(after, "candidate", ""), POLICY, machine_free=True
    )
    (finding,) = found.findings
    assert (finding.unit.regime, str(finding.verdict), finding.rounds) == ("ratio", expected, 20)


@pytest.mark.parametrize(
    ("lost", "code"),
    [
        (failed_row(1, "worker: ended with code 7", cause=Cause.DIED), Exit.REGRESSED),
        (failed_row(1, "codes differ from the reference cast", cause=Cause.NUMERICS), Exit.NUMERICS),
    ],
)
def test_an_arm_that_is_lost_in_the_confirmation_is_no_pass(
    tmp_path: Path, lost: Measurement, code: Exit
) -> None:
    """One of ten units is flagged, and its candidate dies or fails its check when it is measured again."""
    times, again = Times(), Times(seed=1)
    before, after = ([time_row(n, times(f if n == 1 else 1.0)) for n in range(10)] for f in (1.0, 1.1))
    found = run(tmp_path, before, after, confirm=([time_row(1, again())], [lost]))
    (finding,) = [f for f in found.findings if f.unit.case_id == case(1).case_id]
    assert (str(finding.verdict), found.code) == ("REGRESSED", code)
    assert finding.reason.startswith(f"failed in the confirmation: {lost.reason}")


def test_a_check_that_fails_in_the_confirmation_alone_is_a_numerics_failure(tmp_path: Path) -> None:
    times, again = Times(), Times(seed=1)
    sides = [[time_row(1, times(f)), value_row(1, "sqnr_db", 28.5)] for f in (1.0, 1.1)]
    confirm = [[time_row(1, again(f)), value_row(1, "sqnr_db", db)] for f, db in ((1.0, 28.5), (1.1, 20.0))]
    found = run(tmp_path / "1", *sides, confirm=tuple(confirm))
    assert found.code is Exit.NUMERICS
    assert any("28.5 -> 20 dB" in f.reason for f in found.findings)
    refuted = dataclasses.replace(failed_row(1, "sqnr_db 3 below 20", cause=Cause.NUMERICS), metric="sqnr_db")
    found = run(tmp_path / "2", *sides, confirm=(confirm[0], [confirm[1][0], refuted]))
    assert found.code is Exit.NUMERICS


@pytest.mark.parametrize(("condition", "struck"), [("contended", 1), ("throttled", 1), ("throttled", 2)])
def test_a_confirmation_beside_another_process_confirms_nothing(
    tmp_path: Path, condition: str, struck: int
) -> None:
    """Six clean rounds flag 10 %; the confirmation is 20 % slower, and struck on the candidate alone or on both sides."""
    times, again = Times(rounds=6), Times(seed=1)
    before, after = ([time_row(n, times(f if n == 1 else 1.0)) for n in range(10)] for f in (1.0, 1.1))
    timing = {"method": "cuda_events", condition: True}
    confirm = [time_row(1, again(f)) for f in (1.0, 1.2)]
    marked = [dataclasses.replace(r, timing=timing) if i >= 2 - struck else r for i, r in enumerate(confirm)]
    found = run(tmp_path, before, after, confirm=([marked[0]], [marked[1]]))
    assert found.code is (Exit.INCONCLUSIVE if struck == 1 else Exit.REGRESSED)
    assert any("1 confirmations decide nothing" in note for note in found.notes) is (struck == 1)
