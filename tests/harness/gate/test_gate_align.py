"""Log ratios round by round, and samples that are no times. Oracle: numpy's logarithm of medians, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from gate_fixtures import Times, run, time_row

from harness.gate.options import Exit
from harness.gate.unit import State


@pytest.mark.parametrize("stage", ["first", "confirmation"])
@pytest.mark.parametrize("machine_free", [False, True])
@pytest.mark.parametrize(("bad", "round_"), [(0.0, 3), (-1.0, 0), (float("inf"), 9)])
@pytest.mark.parametrize(
    ("sides", "verdict"), [("ab", "INCONCLUSIVE"), ("a", "INCONCLUSIVE"), ("b", "REGRESSED")]
)
def test_a_sample_that_is_no_time_counts_against_its_own_side(
    tmp_path: Path, stage: str, machine_free: bool, bad: float, round_: int, sides: str, verdict: str
) -> None:
    """Three arms of a case, one with an invalid sample; of the confirmation or of the first stage."""
    times = Times()
    sound = [time_row(1, times(), arm) for arm in ("bf16", "fp8", "other")]
    spoilt = times()
    spoilt[round_] = bad
    odd = [*sound[:2], time_row(1, spoilt, "other")]
    stages = [odd if side in sides else sound for side in "ab"]
    more = {} if stage == "first" else {"confirm": stages}
    found = run(
        tmp_path, *(stages if stage == "first" else (sound, sound)), machine_free=machine_free, **more
    )
    (finding,) = [f for f in found.findings if f.key.arm == "other"]
    assert (str(finding.verdict), finding.cause) == (verdict, None)
    assert finding.state is (State.NO_TIME if sides == "b" else State.OPEN)
    assert f"sample of round {round_} is {bad:g} ms" in finding.reason
    assert ("measure it again" in finding.reason) == ("a" in sides)
    assert found.code is (Exit.REGRESSED if sides == "b" else Exit.OK if machine_free else Exit.INCONCLUSIVE)
