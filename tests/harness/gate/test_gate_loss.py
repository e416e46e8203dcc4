"""Oracle: how the invented training runs were made; the verdict itself has its tests in test_verdict_rows.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from curves_for_tests import control, rows_of_runs, shifted
from gate_fixtures import Rows, run

from harness.gate.options import Exit
from harness.gate.policy import load_policy
from harness.gate.unit import Judgement, Unit
from harness.judge.verdict import Run
from harness.store.measurement import Measurement

BASE = control()
GOOD = shifted(BASE)
Runs = dict[int, Run]


def trained(tensorwise: Runs, *others: Measurement) -> Rows:
    return [*rows_of_runs("base", BASE), *rows_of_runs("tensorwise", tensorwise), *others]


def judged(
    tmp: Path, before: Rows, after: Rows, policy: str = "", *, machine_free: bool = False
) -> Judgement:
    """By a policy of these words."""
    tmp.mkdir(exist_ok=True)
    (tmp / "policy.yaml").write_text(policy)
    by = load_policy(tmp / "policy.yaml")
    return run(tmp, before, after, policy=by, machine_free=machine_free)


def of(judgement: Judgement, arm: str = "tensorwise") -> Unit:
    (finding,) = [f for f in judgement.findings if f.key.arm == arm]
    return finding


def test_a_negative_control_has_to_fail(tmp_path: Path) -> None:
    """Nothing passes where no fault could be seen."""
    broken = rows_of_runs("negative_control", shifted(BASE, lambda t: 0.6 * t / (t + 30), ratio=0.6))
    harmless = rows_of_runs("negative_control", GOOD)
    seen = judged(tmp_path / "1", trained(GOOD, *broken), trained(GOOD, *broken))
    assert (str(of(seen, "negative_control").verdict), seen.code) == ("OK", Exit.OK)
    blind = judged(tmp_path / "2", trained(GOOD, *broken), trained(GOOD, *harmless), "on_inconclusive: fail")
    assert {str(of(blind, arm).verdict) for arm in ("negative_control", "tensorwise")} == {"INCONCLUSIVE"}
    assert blind.code is Exit.INCONCLUSIVE


@pytest.mark.parametrize(
    ("kept", "said"),
    [(range(4), "not in the candidate"), ((), "RuntimeError: out of memory")],
)
def test_runs_that_are_lost_are_no_pass(tmp_path: Path, kept: Sequence[int], said: str) -> None:
    """Absent, or crashed with a reason."""
    after = trained({s: r for s, r in GOOD.items() if s in kept})
    if not kept:
        lost = {"status": "failed", "samples": (), "rounds": (), "reason": "RuntimeError: out of memory"}
        after += [replace(r, **lost) for r in rows_of_runs("tensorwise", GOOD) if r.metric == "loss"]
    judgement = judged(tmp_path, trained(GOOD), after)
    lost, *others = [f for f in judgement.findings if f.trouble]
    assert len(others) == 4 - len(kept)
    assert (lost.key.arm, str(lost.verdict), judgement.code) == (
        "tensorwise",
        "REGRESSED",
        Exit.REGRESSED,
    )
    assert said in lost.reason
