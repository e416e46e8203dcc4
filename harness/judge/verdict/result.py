"""Result: the words and figures of one gate, and the limits that all gates are held against.

Limits were calibrated on planted faults in a toy (2 layers, width 48, 300 steps, six seeds): correct FP8 shows a
largest smoothed gap of 0.035 to 0.06 % and gradient-norm ratios of 0.997 to 1.000.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from harness.store.loss_limits import MIN_POINTS as MIN_POINTS
from harness.store.loss_limits import MIN_SEEDS as MIN_SEEDS

Status = Literal["PASS", "WARN", "FAIL", "INCONCLUSIVE"]

GATES: dict[str, str] = {
    "L1": "finite",
    "L2": "spikes",
    "L3": "early window",
    "L4": "late window",
    "L4h": "held-out loss",
    "L5": "gap trend",
    "L6": "gradient norm",
    "prefix": "bitwise until the switch",
    "band": "within the seeds' spread",
}

MARGIN = 0.0025  # of the control's mean loss; the order of what DeepSeek-V3 reports for FP8 at scale
MIN_GOLDEN = 5  # golden runs below which their band cannot warn: 11.5 sd wide with 3, 5.0 with 5
LATE = 0.2
EARLY_STEPS = 1000
EARLY_SHARE = 1 / 3
EARLY_MEAN, EARLY_MAX = 0.0025, 0.01  # of the loss, where no golden arm sets the band
FAIL_TIMES = 4.0  # FAIL beyond so many bands
ALPHA = 0.05  # of each of the two one-sided tests whose PASS is "equivalent"
FAIL_CONFIDENCE = 0.99  # of the two-sided interval that must lie wholly outside for a FAIL of a gap gate
SPIKES_FAIL, SPIKES_UNCLEAR = 0.01, 0.125  # p of the excess of bursts: FAIL, and can't tell, up to these
MOST_SEEDS = 3 / 4  # share of the seeds that must be beyond the widest band of L3, on one side, for a FAIL
MOST_OF_GOLDEN = 2.0  # the golden arm's band of FAIL reaches up to so many times the fixed one's
MIN_WINDOW = 10  # logged steps in FP8 of a window; fewer say nothing
STRAY_MARGINS = (
    8.0  # a seed whose late or held-out gap is so many margins is named, and nothing passes beside it
)
STRAY = 1 / 8  # share of the seeds that may be beyond the widest band of L3 in a PASS
MOST_MASKED = (
    1 / 4
)  # share of a window whose gaps are interpolated across spikes; beyond it the window can't tell
SEARCHED = 1000.0  # L5 looks for the step at which the margin is met up to so many times the run
GRAD_BAND = (0.98, 1.02)  # of the ratio to the control
GRAD_WARN, GRAD_FAIL = 0.01, 0.05  # of the ratio to the golden arm, in either direction
HORIZON = 10.0  # L5 projects the gap to so many times the run


@dataclass(frozen=True, slots=True)
class GateResult:
    """What one gate says: its status, the figures that it rests on and both in one sentence.

    Attributes:
        gate: a key of `GATES`.
        effect, low, high: the estimate over seeds with its interval, in `unit`; NaN where there is none.
        sd: between seeds, in `unit`.
        seeds: how many pairs it rests on.
        margin: the limit that the effect is held against, in `unit`.
        unit: "of the loss", "ratio", "spikes" or "".
        margin_at_step: of the trend: after how many steps its upper bound meets the margin; infinity where it does not
            within `SEARCHED` times the run, NaN for every other gate.
    """

    gate: str
    status: Status
    sentence: str
    effect: float = math.nan
    low: float = math.nan
    high: float = math.nan
    sd: float = math.nan
    seeds: int = 0
    margin: float = math.nan
    unit: str = ""
    margin_at_step: float = math.nan


class CannotTell(Exception):  # noqa: N818  # a result, not an error
    """Raised by a gate whose question these runs cannot answer; its text becomes the sentence of INCONCLUSIVE."""


def percent(value: float) -> str:
    """A share of the loss with its sign: "+0.018 %".

    >>> percent(0.000183), percent(-0.0025)
    ('+0.018 %', '-0.250 %')
    """
    digits = 3 if abs(value) < 0.1 else 1
    shown = round(100 * value, digits) + 0.0  # no minus before a zero
    return f"{shown:+.{digits}f} %"
