"""Result: the words and figures of one gate, and the limits that others than the gates use as well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from harness.store.loss_limits import MIN_POINTS as MIN_POINTS
from harness.store.loss_limits import MIN_SEEDS as MIN_SEEDS

GateStatus = Literal["PASS", "WARN", "FAIL", "INCONCLUSIVE"]

GATES: dict[str, str] = {
    "L1": "finite",
    "L2": "spikes",
    "L3": "course",
    "L4": "late window",
    "L4h": "held-out loss",
    "L5": "gap trend",
    "L6": "gradient norm",
    "prefix": "bitwise until the switch",
    "band": "within the seeds' spread",
}

EQUIVALENCE = ("L4", "L4h")  # by an interval that lies inside the margin
MARGIN = 0.0025  # of the control's mean loss; the order of what DeepSeek-V3 reports for FP8 at scale
LATE = 0.2


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
    """

    gate: str
    status: GateStatus
    sentence: str
    effect: float = math.nan
    low: float = math.nan
    high: float = math.nan
    sd: float = math.nan
    seeds: int = 0
    margin: float = math.nan
    unit: str = ""


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
