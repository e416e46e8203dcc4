"""Oracle: how the invented training runs were made; the verdict itself has its tests in test_verdict_rows.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from curves_for_tests import control, rows_of_runs, shifted
from gate_fixtures import Times, time_row, write

from harness.gate.exit_code import Exit
from harness.gate.judge import Finding, Judgement, judge
from harness.gate.policy import load_policy
from harness.gate.sides import load_side
from harness.judge.verdict import Run
from harness.store.measurement import Measurement

BASE = control()
GOOD, BAD = shifted(BASE), shifted(BASE, 0.1)
Rows = Sequence[Measurement]
Runs = dict[int, Run]


def trained(tensorwise: Runs, *others: Measurement) -> Rows:
    return [*rows_of_runs("base", BASE), *rows_of_runs("tensorwise", tensorwise), *others]


def run(tmp: Path, before: Rows, after: Rows, policy: str = "", *, machine_free: bool = False) -> Judgement:
    file = tmp / "policy.yaml"
    tmp.mkdir(exist_ok=True)
    file.write_text(policy)
    sides = [
        load_side(write(tmp / name, rows, session=name), name, "")
        for name, rows in (("baseline", before), ("candidate", after))
    ]
    return judge(*sides, load_policy(file), machine_free=machine_free)


def of(judgement: Judgement, arm: str) -> Finding:
    (finding,) = [f for f in judgement.findings if f.unit.arm == arm]
    return finding


@pytest.mark.parametrize(
    ("before", "after", "verdict", "code", "says"),
    [
        (GOOD, BAD, "REGRESSED", Exit.NUMERICS, "FAIL against base; baseline: PASS; L3"),
        (BAD, BAD, "REGRESSED", Exit.NUMERICS, "FAIL against base; L3"),
        (GOOD, GOOD, "OK", Exit.OK, "PASS against base"),
        (BAD, GOOD, "IMPROVED", Exit.OK, "PASS against base; baseline: FAIL"),
    ],
)
def test_a_loss_that_fails_is_exit_4(
    tmp_path: Path,
    before: Runs,
    after: Runs,
    verdict: str,
    code: Exit,
    says: str,
) -> None:
    judgement = run(tmp_path, trained(before), trained(after))
    finding = of(judgement, "tensorwise")
    assert (str(finding.verdict), judgement.code) == (verdict, code)
    assert finding.reason.startswith(says)
    assert finding.unit.metric == "loss"


def test_a_negative_control_has_to_fail(tmp_path: Path) -> None:
    broken = rows_of_runs("negative_control", shifted(BASE, lambda t: 0.6 * t / (t + 30), ratio=0.6))
    harmless = rows_of_runs("negative_control", GOOD)
    seen = run(tmp_path / "1", trained(GOOD, *broken), trained(GOOD, *broken))
    assert (str(of(seen, "negative_control").verdict), seen.code) == ("OK", Exit.OK)
    blind = run(tmp_path / "2", trained(GOOD, *broken), trained(GOOD, *harmless))
    assert str(of(blind, "negative_control").verdict) == "INCONCLUSIVE"
    assert "it has to FAIL" in of(blind, "negative_control").reason
    assert (
        str(of(blind, "tensorwise").verdict) == "INCONCLUSIVE"
    )  # nothing passes where no fault could be seen
    strict = run(tmp_path / "3", trained(GOOD, *broken), trained(GOOD, *harmless), "on_inconclusive: fail")
    assert strict.code is Exit.INCONCLUSIVE


def test_runs_that_are_lost_are_no_pass(tmp_path: Path) -> None:
    fewer = {s: r for s, r in GOOD.items() if s != 3}
    judgement = run(tmp_path, trained(GOOD), trained(fewer))
    lost = [f for f in judgement.findings if f.unit.trouble]
    assert [(f.unit.arm, str(f.verdict)) for f in lost] == [("tensorwise", "REGRESSED")]
    assert "1 of 5 runs: not in the candidate" in lost[0].reason
    assert judgement.code is Exit.REGRESSED


def test_a_run_that_crashed_gives_its_reason(tmp_path: Path) -> None:
    crashed = [
        Measurement(
            row.suite, row.case_id, row.arm, row.axes, "loss", "failed", reason="RuntimeError: out of memory"
        )
        for row in rows_of_runs("tensorwise", GOOD)
        if row.metric == "loss"
    ]
    judgement = run(tmp_path, trained(GOOD), [*rows_of_runs("base", BASE), *crashed])
    lost = next(f for f in judgement.findings if f.unit.trouble)
    assert "5 of 5 runs: RuntimeError: out of memory" in lost.reason
    assert judgement.code is Exit.REGRESSED


def test_it_is_judged_across_machines_and_beside_times(tmp_path: Path) -> None:
    times = Times()
    judgement = run(
        tmp_path,
        [time_row(1, times()), *trained(GOOD)],
        [time_row(1, times()), *trained(BAD)],
        machine_free=True,
    )
    assert judgement.code is Exit.NUMERICS
    assert str(of(judgement, "tensorwise").verdict) == "REGRESSED"


def test_the_policy_can_ignore_it_or_allow_it_for_a_while(tmp_path: Path) -> None:
    times = Times()
    rows = [time_row(1, times()), *trained(GOOD)], [time_row(1, times()), *trained(BAD)]
    assert run(tmp_path / "1", *rows, "metrics: {loss: {rule: ignore}}").code is Exit.OK
    allow = "allow: [{match: {suite: divergence, arm: tensorwise, metric: loss}, until: 2999-01-01, reason: known}]"
    allowed = run(tmp_path / "2", *rows, allow)
    assert allowed.code is Exit.OK
    assert str(of(allowed, "tensorwise").verdict) == "REGRESSED"
