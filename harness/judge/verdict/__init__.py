"""Verdict: does a candidate train as its control does? PASS, FAIL or INCONCLUSIVE, on arrays or on stored rows.

`judge_pairs` is a pure function of curves by seed; `judge` applies it to the rows of the store. Imports no torch.
"""

from harness.judge.verdict.curves import Curve, Run, ema
from harness.judge.verdict.paired import Verdict, judge_other_seeds, judge_pairs
from harness.judge.verdict.result import GATES, MARGIN, GateResult
from harness.judge.verdict.rows import ArmVerdict, StoredVerdicts, judge
from harness.judge.verdict.time_to_loss import Reach, time_to_loss

__all__ = [
    "GATES",
    "MARGIN",
    "ArmVerdict",
    "Curve",
    "GateResult",
    "Reach",
    "Run",
    "StoredVerdicts",
    "Verdict",
    "ema",
    "judge",
    "judge_other_seeds",
    "judge_pairs",
    "time_to_loss",
]
