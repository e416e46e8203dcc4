"""Log ratios round by round. Oracle: numpy's logarithm of medians, by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gate_fixtures import Times, run, time_row

from harness.gate.align import fill_rounds
from harness.gate.decide import Verdict
from harness.gate.exit_code import Exit
from harness.gate.judged_metric import Unit
from harness.gate.policy import Rule
from harness.gate.sides import FIRST


@pytest.mark.parametrize(("better", "sign"), [("lower", 1.0), ("higher", -1.0)])
def test_a_positive_log_ratio_is_worse_whatever_is_better(better: str, sign: float) -> None:
    before = SimpleNamespace(samples=[1.0, 2.0, 3.0, 8.0], rounds=[1, 1, 2, 2])
    after = SimpleNamespace(samples=[3.0, 3.0, 11.0, 11.0], rounds=[1, 1, 2, 2])
    unit = Unit("s", "c", "c", "a", "m", "", "", "1", better, Rule("timed", 0.05), rows=([before], [after]))
    fill_rounds([unit], FIRST, by_number=True)
    np.testing.assert_allclose(unit.first, sign * np.log([3.0 / 1.5, 11.0 / 5.5]))


@pytest.mark.parametrize("bad", [0.0, -1.0])
@pytest.mark.parametrize("machine_free", [False, True])
def test_a_sample_that_is_no_time_counts_against_its_own_side(
    tmp_path: Path, bad: float, machine_free: bool
) -> None:
    """Three arms of a case, one with an invalid sample in round 3."""
    times = Times()
    sound = [time_row(1, times(), arm) for arm in ("bf16", "fp8", "other")]
    spoilt = [*times()[:3], bad, *times()[4:]]
    odd = [*sound[:2], time_row(1, spoilt, "other")]
    found = run(tmp_path / "baseline", odd, sound, machine_free=machine_free)
    (finding,) = [f for f in found.findings if f.unit.arm == "other"]
    assert (finding.verdict, finding.cause) == (Verdict.INCONCLUSIVE, None)
    assert (
        finding.reason
        == f"the baseline's sample of round 3 is {bad:g} ms, which is no time: measure it again"
    )
    assert found.code is (Exit.OK if machine_free else Exit.INCONCLUSIVE)  # one of three times
    found = run(tmp_path / "candidate", sound, odd, machine_free=machine_free)
    (finding,) = [f for f in found.findings if f.unit.arm == "other"]
    assert (finding.verdict, finding.cause) == (Verdict.REGRESSED, None)
    assert finding.unit.invalid
    assert f"the candidate's sample of round 3 is {bad:g} ms, which is no time" in finding.reason
    assert found.code is Exit.REGRESSED
    found = run(tmp_path / "both", odd, odd, machine_free=machine_free)
    (finding,) = [f for f in found.findings if f.unit.arm == "other"]
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert f"the candidate's sample of round 3 is {bad:g} ms too" in finding.reason


@pytest.mark.parametrize("machine_free", [False, True])
def test_a_sample_of_the_confirmation_that_is_no_time_counts_against_its_own_side(
    tmp_path: Path, machine_free: bool
) -> None:
    times = Times()
    arms = ("bf16", "fp8")
    first = [time_row(1, times(), arm) for arm in arms], [time_row(1, times(), arm) for arm in arms]
    sound = [time_row(1, times(), arm) for arm in arms]
    odd = [sound[0], time_row(1, [0.0, *times()[1:]], "fp8")]
    for name, again, verdict in (("b", (odd, sound), "INCONCLUSIVE"), ("c", (sound, odd), "REGRESSED")):
        found = run(tmp_path / name, *first, confirm=again, machine_free=machine_free)
        (finding,) = [f for f in found.findings if f.unit.arm == "fp8"]
        assert str(finding.verdict) == verdict
        assert "sample of round 0 is 0 ms" in finding.reason
