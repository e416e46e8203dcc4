"""Broken: the judgement where one side does not run at all. A candidate that does not import is a finding, not a crash."""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING

from harness.gate.decide import Verdict
from harness.gate.exit_code import Exit
from harness.gate.policy import Rule
from harness.gate.sides import Side
from harness.gate.unit import Cause, Control, Finding, Judgement, Key, State, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def one_sided(
    trees: Mapping[str, Path],
    what: tuple[str, str, str],
    side: str,
    broken: str,
    mends: str,
    note: str,
    *,
    before_known: bool = True,
) -> Judgement:
    """One finding: REGRESSED where the candidate is broken, IMPROVED where it mends the baseline.

    Args:
        trees: both.
        what: suite, case and metric of the one unit.
        side: that was found broken.
        broken: why the candidate is; "" where it is not.
        mends: what is said where it is not.
        note: what is said in any case.
        before_known: the baseline was tried.
    """
    suite, case, metric = what
    before = 0.0 if side == "baseline" else 1.0 if before_known else math.nan
    unit = Unit(
        Key(suite, "", "", metric, "", ""), case, "", "higher", Rule("exact"), before, float(not broken)
    )
    finding = Finding(unit, Verdict.IMPROVED, mends)
    if broken:
        unit.set_aside(State.LOST, broken)
        finding = Finding(unit, Verdict.REGRESSED, broken, cause=Cause(suite))
    baseline, candidate = (Side(str(trees.get(name, name)), {}, {}, "") for name in ("baseline", "candidate"))
    return Judgement(
        baseline,
        candidate,
        "broken",
        (finding,),
        Control(False, "no control case was measured"),
        (note,),
        Exit.REGRESSED if broken else Exit.OK,
        datetime.datetime.now(datetime.UTC).date(),
    )
