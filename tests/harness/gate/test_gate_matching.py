"""Oracle: which rows of two sides belong together, what is judged about them, and that what is lost is no pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from gate_fixtures import ENV, POLICY, Rows, Times, case, failed_row, run, time_row, value_row

from harness.gate.options import Exit, Loud
from harness.gate.unit import State
from harness.store.errors import Cause
from harness.store.measurement import Measurement

NEWER = (ENV, {**ENV, "driver": "575.1"})


def ten(slower: float = 1.0, rounds: int = 10) -> tuple[Rows, Rows]:
    """Ten units, of which the candidate's second one may be slower."""
    times = Times(rounds=rounds)
    return tuple([time_row(n, times(f if n == 1 else 1.0)) for n in range(10)] for f in (1.0, slower))


@pytest.mark.parametrize(
    ("lost", "code"),
    [
        (failed_row(1, "RuntimeError: out of memory"), Exit.REGRESSED),
        (failed_row(1, "needs sm_89", status="skipped"), Exit.REGRESSED),
        (failed_row(1, "sqnr_db 3 below 20", cause=Cause.NUMERICS), Exit.NUMERICS),
    ],
)
@pytest.mark.parametrize("stage", ["first", "confirmation"])
def test_an_arm_that_no_longer_runs_is_no_pass(
    tmp_path: Path, lost: Measurement, code: Exit, stage: str
) -> None:
    """In the first stage, its figures are gone with it; or one of ten units is flagged, and lost when measured again."""
    if stage == "first":
        found = run(tmp_path, [time_row(1, Times()()), value_row(1, "sqnr_db", 28.5)], [lost])
        assert found.counted["REGRESSED"] == 2
    else:
        found = run(tmp_path, *ten(1.1), confirm=([time_row(1, Times(seed=1)())], [lost]))
        assert found.counted["REGRESSED"] == 1
    finding = next(f for f in found.findings if f.key.case_id == case(1).case_id)
    assert (str(finding.verdict), found.code) == ("REGRESSED", code)
    assert lost.reason in finding.reason


@pytest.mark.parametrize("confirm", [False, True])
@pytest.mark.parametrize("cause", [Cause.RUN, Cause.NUMERICS])
def test_a_failed_arm_is_not_taken_for_a_skipped_one(tmp_path: Path, cause: Cause, *, confirm: bool) -> None:
    """A worker writes what it skipped, then the figures of a check, then the failed time. On another machine a skipped arm is open."""
    skipped, figure, failed = (
        failed_row(1, "no oracle", status="skipped"), failed_row(1, "3; below 20", cause=cause), failed_row(1, "below 20", cause=cause),
    )  # fmt: skip
    lost = [
        dataclasses.replace(skipped, metric="mismatches"), dataclasses.replace(figure, metric="sqnr_db"), failed,
    ]  # fmt: skip
    before = [time_row(1, Times()()), value_row(1, "rel_err_max", 0.1)]
    sides: Any = {"confirm": (before, lost)} if confirm else {}
    found = run(tmp_path, before, before if confirm else lost, envs=NEWER, machine_free=True, **sides)
    assert found.code is (Exit.NUMERICS if cause is Cause.NUMERICS else Exit.REGRESSED)
    when = " in the confirmation" if confirm else ""
    assert [f.reason.partition(": what")[0] for f in found.findings] == [f"failed{when}: below 20"] * 2


def test_a_check_that_fails_in_the_confirmation_alone_is_a_numerics_failure(tmp_path: Path) -> None:
    times, again = Times(), Times(seed=1)
    sides = [[time_row(1, times(f)), value_row(1, "sqnr_db", 28.5)] for f in (1.0, 1.1)]
    before, after = [
        [time_row(1, again(f)), value_row(1, "sqnr_db", db)] for f, db in ((1.0, 28.5), (1.1, 20.0))
    ]
    found = run(tmp_path / "1", *sides, confirm=(before, after))
    assert found.code is Exit.NUMERICS
    assert any("28.5 -> 20 dB" in f.reason for f in found.findings)


STEADY = Times()()
NINE = [time_row(n, STEADY) for n in range(9)]
LACKS = failed_row(1, "needs a compiler", status="skipped")


@pytest.mark.parametrize(
    ("before", "after", "options", "code", "counted", "said"),
    [
        (NINE[:1], NINE, {}, 0, {"OK": 1}, "8 cases are new"),
        ([*NINE, failed_row(9, "code 7")], [*NINE, time_row(9, STEADY)], {}, 0, {"OK": 9}, "1 arms failed in the baseline"),
        ([*NINE, failed_row(9, "code -9", cause=Cause.DIED)], [*NINE, time_row(9, STEADY)], {}, 0, {"OK": 9, "INCONCLUSIVE": 1},
         "need not be its code's doing"),
        ([*NINE, failed_row(9, "full")], NINE, {}, 0, {"OK": 9, "INCONCLUSIVE": 1}, "not in the candidate"),
        ([*NINE, failed_row(9, "full")], [*NINE, failed_row(9, "too large", status="skipped")], {}, 0,
         {"OK": 9, "INCONCLUSIVE": 1}, "skipped: too large"),
        ([NINE[0], LACKS], [NINE[0], LACKS], {}, 0, {"OK": 1}, "at most"),
        (NINE[1:2], [LACKS], {"machine_free": True}, 1, {"REGRESSED": 1}, "needs a compiler"),
        (NINE[1:2], [LACKS], {"machine_free": True, "envs": NEWER}, 6, {"INCONCLUSIVE": 1}, "machine is another"),
    ],
    ids=["new", "mended", "killed", "gone", "skipped", "never", "lost", "lost elsewhere"],
)  # fmt: skip
def test_what_one_side_lacks(
    tmp_path: Path, before: Rows, after: Rows, options: dict[str, Any], code: int, counted: dict[str, int], said: str
) -> None:  # fmt: skip
    """What has nothing to fall behind is noted, what failed and is gone is open, and nothing that was there may go."""
    found = run(tmp_path, before, after, **options)
    assert (int(found.code), found.counted) == (code, counted)
    assert any(said in text for text in (*found.notes, *(f.reason for f in found.findings)))


@pytest.mark.parametrize("machine_free", [False, True])
@pytest.mark.parametrize("broken", [2, 9])
def test_arms_that_fail_on_both_sides_are_no_pass(tmp_path: Path, broken: int, machine_free: bool) -> None:
    """Ten arms: more than the policy's fifth may not stay open; fewer do, each with a note."""
    times = Times()
    good = [row for n in range(broken, 10) for row in (time_row(n, times()), value_row(n, "sqnr_db", 30.0))]
    bad = [failed_row(n, f"AttributeError: no prime, {n}") for n in range(broken)]
    found = run(tmp_path, [*good, *bad], [*good, *bad], machine_free=machine_free)
    assert found.code is (Exit.OK if broken <= 2 else Exit.INCONCLUSIVE)
    failed = [f for f in found.findings if f.state is State.FAILED_TWICE]
    assert {str(f.verdict) for f in failed} == {"INCONCLUSIVE"}
    assert [f.key.case_id for f in failed] == [case(n).case_id for n in range(broken)]
    assert "no prime, 0" in failed[0].reason
    (note,) = [n for n in found.notes if n.startswith(f"NOT JUDGED: {broken} arms failed on both sides")]
    assert isinstance(note, Loud)


STATED = {"compile_graph_breaks": 0, "operator_calls": 10, "fp8_layers": 9}


@pytest.mark.parametrize(
    ("bytes_moved", "resolved", "verdicts", "code"),
    [
        (2e6, {**STATED, "compile_graph_breaks": 2, "operator_calls": 9}, ("REGRESSED", "REGRESSED", "IMPROVED", "OK"), 1),
        (1e6, {**STATED, "fp8_layers": 8}, ("OK", "OK", "OK", "REGRESSED"), 1),  # less is worse
        (1e6, STATED, ("OK", "OK", "OK", "OK"), 0),
        (None, {}, ("INCONCLUSIVE",) * 4, 0),  # no longer stated
    ],
)  # fmt: skip
def test_what_a_row_states_about_itself_is_judged(
    tmp_path: Path, bytes_moved: float | None, resolved: dict[str, int], verdicts: tuple[str, ...], code: int
) -> None:
    times = Times()
    one = time_row(1, times(), bytes_moved=1e6, resolved=STATED)
    other = time_row(1, times(), bytes_moved=bytes_moved, resolved=resolved)
    found = run(tmp_path, [one], [other])
    names = ("bytes_moved", "compile_graph_breaks", "operator_calls", "fp8_layers")
    assert {f.key.metric: str(f.verdict) for f in found.findings} == {
        "time_ms": "OK", **dict(zip(names, verdicts, strict=True)),
    }  # fmt: skip
    assert int(found.code) == code


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
    """20 % slower, and the rows say that the device was throttled or shared; or so says the confirmation of 10 %."""

    def marked(rows: Rows, side: str) -> Rows:
        timing = {"method": "cuda_events", condition: struck in (side, "both")}
        return [dataclasses.replace(row, timing=timing) for row in rows]

    times, again = Times(), Times(seed=1)
    rows = [marked([time_row(1, times(f))], side) for side, f in (("baseline", 1.0), ("candidate", 1.2))]
    found = run(tmp_path, *rows)
    (finding,) = found.findings
    assert (str(finding.verdict), finding.flagged) == (
        ("REGRESSED", True) if decides else ("INCONCLUSIVE", False)
    )
    assert int(found.code) == (1 if decides else 6)
    assert finding.change == pytest.approx(1.2, abs=0.02)  # kept, and shown
    assert any(n.startswith("1 times were measured ") for n in found.notes)
    policy = dataclasses.replace(POLICY, exclude=())
    assert int(run(tmp_path / "all", *rows, policy=policy).code) == 1
    confirm = [marked([time_row(1, again(f))], side) for side, f in (("baseline", 1.0), ("candidate", 1.2))]
    found = run(tmp_path / "again", *ten(1.1, rounds=6), confirm=tuple(confirm))
    assert found.code is (Exit.REGRESSED if decides else Exit.INCONCLUSIVE)
    assert any("1 confirmations decide nothing" in note for note in found.notes) is not decides


@pytest.mark.parametrize(("now", "judged"), [("2.13.0+cpu", True), ("2.14", False), ("2.13.1", False)])
def test_operator_calls_are_judged_under_one_torch_only(tmp_path: Path, now: str, judged: bool) -> None:
    """Open under another release, and neither passed nor gone; another build is the same release."""
    times = Times()
    rows = [
        [time_row(1, times(), resolved={"operator_calls": n}), value_row(1, "rel_err_max", 0.1)]
        for n in (10, 11)
    ]
    found = run(tmp_path, *rows, envs=(ENV, {**ENV, "torch": now}), machine_free=True)
    assert found.code is (Exit.REGRESSED if judged else Exit.OK)
    assert found.counted.get("INCONCLUSIVE", 0) == (not judged)
    assert any(isinstance(n, Loud) and "operator_calls of 1 units" in n for n in found.notes) is not judged


def test_exact_counts_ratchet(tmp_path: Path) -> None:
    """An improvement is told to be adopted; once it is the baseline, a return is a regression."""
    nine, eight = (
        [time_row(1, Times()(), resolved={"operator_calls": n}), value_row(1, "rel_err_max", 0.1)]
        for n in (9, 8)
    )
    better, back = (
        run(tmp_path / str(i), *rows, machine_free=True)
        for i, rows in enumerate(((nine, eight), (eight, nine)))
    )
    assert (better.code, back.code) == (0, 1)
    for found, told in ((better, True), (back, False)):
        assert any("1 exact counts improved" in note for note in found.notes) is told
