"""Limits of the kernels that cast, as data; a kernel beyond one is named with its figure and the limit.

The figures are those of one launch on 16384 x 4096 bfloat16 values (`read` of `harness.meter.facts`). Why these: an SM of
an H200 has room for 27 instructions an element, and for half as many on its integer unit, while it copies one
bfloat16 value to two codes at 4.3 TB/s; about 40 KB in flight per SM keep the memory busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.meter.facts import Facts

CTAS, IN_FLIGHT = 3, 64 * 1024  # either is enough


@dataclass(frozen=True, slots=True)
class Limit:
    """What a kernel may take.

    Attributes:
        per_element: executed instructions.
        conversions: to FP8, an element: one for each scale and format.
    """

    per_element: float
    conversions: float


ONE_SCALE, TWO_SCALES = Limit(12, 1), Limit(24, 2)
LIMITS: dict[tuple[str, str], Limit] = {  # by operator and kernel
    ("cast", "_cast_kernel"): ONE_SCALE,
    ("cast_both", "_cast_both_kernel"): ONE_SCALE,
    ("cast_delayed", "_cast_kernel"): ONE_SCALE,
    ("cast_delayed_both", "_cast_both_kernel"): ONE_SCALE,
    ("cast_128x128_both", "_cast_blocks_kernel"): ONE_SCALE,
    ("cast_rowwise_both", "_cast_rows_cols_kernel"): TWO_SCALES,
    ("cast_1x128_both", "_cast_blocks_kernel"): TWO_SCALES,
}
SLACK = 0.05  # of conversions: elements that hang over an edge are converted and thrown away


def violations(facts: Facts, limit: Limit) -> list[str]:
    """What is beyond the limit, in words; empty where nothing is.

    >>> from dataclasses import replace
    >>> violations(GOOD, ONE_SCALE)
    []
    >>> violations(replace(GOOD, per_element=21.5, stack=8), ONE_SCALE)
    ['21.5 instructions an element, at most 12', '8 bytes of stack: registers spill']
    """
    found = []
    if facts.doubts:
        found.append(f"could not be counted: {facts.doubts[0]}")
    if not 0 < facts.per_element <= limit.per_element:
        found.append(f"{facts.per_element:.1f} instructions an element, at most {limit.per_element:g}")
    if not abs(facts.conversions - limit.conversions) <= SLACK:
        found.append(f"{facts.conversions:.2f} conversions an element, expected {limit.conversions:g}")
    if facts.ctas_per_sm < CTAS and facts.in_flight < IN_FLIGHT:
        found.append(
            f"{facts.ctas_per_sm} programs and {facts.in_flight // 1024} KiB in flight per SM, expected {CTAS} or "
            f"{IN_FLIGHT // 1024}"
        )
    if facts.stack:
        found.append(f"{facts.stack} bytes of stack: registers spill")
    return found


def _good() -> Facts:
    from harness.meter.facts import Facts

    return Facts(
        "3.6.0",
        48,
        0,
        8192,
        5,
        660,
        1.0,
        9.9,
        4.0,
        1.0,
        81920,
        13.0,
        {16: 1.0},
        {16: 1.0},
        4.0,
        "",
        "alu",
        {},
    )


GOOD = _good()
