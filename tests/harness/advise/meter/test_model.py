"""Oracle: the closed form of each limit, and what was published of casts before the model was written."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.advise.meter.model import H100, H200, LATENCY_S, Work, share_of_copy

LONG = 132 * 8 * 1000
FREE = Work(bytes_moved=1 << 20, busiest_cycles=0, waits=0, ctas_per_sm=8, programs=LONG)


def test_bytes_alone_reach_a_copy() -> None:
    assert share_of_copy(FREE, H200) == pytest.approx(1)


def test_two_equal_limits_reach_71_percent() -> None:
    cycles = FREE.bytes_moved / H200.copy_bytes_s * H200.processors * H200.clock_hz
    many = replace(FREE, busiest_cycles=cycles, ctas_per_sm=10**6, programs=132 * 10**6)
    assert share_of_copy(many, H200) == pytest.approx(math.sqrt(0.5), rel=1e-3)


def test_one_program_that_always_waits() -> None:
    """Bandwidth of the wait: bytes / latency for each SM."""
    work = Work(bytes_moved=1024, busiest_cycles=0, waits=1, ctas_per_sm=1, programs=LONG)
    assert share_of_copy(work, H100) == pytest.approx(132 * 1024 / LATENCY_S / H100.copy_bytes_s, rel=0.01)


def test_a_wave_that_is_not_full_costs() -> None:
    """528 programs where 396 run at once, against 396 with the same bytes in all."""
    base = Work(bytes_moved=1 << 19, busiest_cycles=9000, waits=16, ctas_per_sm=3, programs=528)
    even = replace(
        base, programs=396, bytes_moved=base.bytes_moved * 4 / 3, busiest_cycles=12000, waits=16 * 4 / 3
    )
    assert share_of_copy(even, H200) > share_of_copy(base, H200)


def test_a_launch_that_cannot_run_has_no_share() -> None:
    with pytest.raises(ValueError, match="no program fits"):
        share_of_copy(replace(FREE, ctas_per_sm=0), H200)
    with pytest.raises(ValueError, match="no bandwidth"):
        share_of_copy(replace(FREE, bytes_moved=0), H200)
