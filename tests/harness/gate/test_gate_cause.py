"""Oracle: slowdowns whose cause is put in by hand: a clock, a kernel, a host, a compiler, a machine."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
from gate_fixtures import Times, time_row, write

from harness import store
from harness.gate.cause import Cause, cause_of, cycle_ratio
from harness.gate.judged_metric import Unit
from harness.gate.policy import Rule
from harness.store.measurement import Measurement

SLOWER = math.log(1.10)


def rows(tmp: Path, name: str, row: Measurement) -> list[object]:
    frame: pd.DataFrame = store.read(write(tmp / name, [row]))
    return list(frame.itertuples(index=False))


def unit_of(tmp: Path, before: Measurement, after: Measurement, metric: str = "time_ms") -> Unit:
    return Unit(
        "gemm", "id", "1x64x64", "fp8", metric, "isolated", "", "ms", "lower", Rule("timed", 0.03),
        rows=(rows(tmp, "a", before), rows(tmp, "b", after)),
    )  # fmt: skip


def cause(
    tmp: Path, before: Measurement, after: Measurement, control: float = 0.0, metric: str = "time_ms"
) -> Cause:
    found = cause_of(unit_of(tmp, before, after, metric), SLOWER, control)
    assert found is not None
    return found


def test_a_slow_clock_is_named_as_a_clock(tmp_path: Path) -> None:
    """10 % slower at a clock 10 % lower: the same cycles, so the code is not to blame."""
    times = Times()
    before = time_row(1, times(), clocks=[1980.0] * 10)
    after = time_row(1, times(1.1), clocks=[1800.0] * 10)
    found = cause(tmp_path, before, after)
    assert found.name == "clock"
    assert "time +10.0%" in found.evidence


def test_more_cycles_at_the_same_clock_are_the_kernel(tmp_path: Path) -> None:
    times = Times()
    before, after = (time_row(1, times(f), clocks=[1980.0] * 10) for f in (1.0, 1.1))
    found = cause(tmp_path, before, after)
    assert found.name == "kernel"
    assert "cycles +" in found.evidence


def test_cycles_are_compared_round_by_round(tmp_path: Path) -> None:
    """A clock that wanders from round to round cancels in cycles."""
    clocks = [1000.0 * (1 + 0.1 * (i % 3)) for i in range(10)]
    times = [2000.0 / c for c in clocks]
    unit = unit_of(tmp_path, time_row(1, times, clocks=clocks), time_row(1, [2.4] * 10, clocks=[1000.0] * 10))
    assert cycle_ratio(*unit.rows) == pytest.approx(math.log(1.2))


def test_half_read_clocks_say_nothing(tmp_path: Path) -> None:
    times = Times()
    before = time_row(1, times(), clocks=[1980.0] * 9 + [math.nan])
    after = time_row(1, times(1.1), clocks=[1800.0] * 10)
    assert cycle_ratio(*unit_of(tmp_path, before, after).rows) is None
    unit = unit_of(tmp_path / "2", before, after)
    assert cause_of(unit, SLOWER, 0.0) is None  # nothing was counted, so no kernel is blamed


@pytest.mark.parametrize("fact", ["compile_graphs", "compile_graph_breaks", "recompiles"])
def test_more_graphs_are_the_compiler(tmp_path: Path, fact: str) -> None:
    times = Times()
    before, after = time_row(1, times(), resolved={fact: 1}), time_row(1, times(1.1), resolved={fact: 2})
    assert cause(tmp_path, before, after) == Cause("compile", f"{fact} 1 -> 2")


def test_a_compile_time_is_the_compiler(tmp_path: Path) -> None:
    times = Times()
    assert (
        cause(tmp_path, time_row(1, times()), time_row(1, times(1.1)), metric="compile_s").name == "compile"
    )


def test_more_operators_are_the_host(tmp_path: Path) -> None:
    times = Times()
    before, after = (time_row(1, times(), resolved={"operator_calls": n}) for n in (12, 15))
    assert cause(tmp_path, before, after) == Cause("host", "operators called 12 -> 15")


def test_samples_that_waited_for_the_host(tmp_path: Path) -> None:
    times = Times()
    before, after = time_row(1, times()), time_row(1, times(1.1), late=4)
    found = cause(tmp_path, before, after)
    assert found.name == "host"
    assert "+49.2%" not in found.evidence  # a share, not a logarithm of one
    assert "40%" in found.evidence


def test_the_same_operators_are_the_kernel_and_other_kernels_are_named(tmp_path: Path) -> None:
    times = Times()
    before, after = (
        time_row(1, times(), resolved={"operator_calls": 12, "kernels": [name]}) for name in ("old", "new")
    )
    found = cause(tmp_path, before, after)
    assert found == Cause("kernel", "the same operators were called; other kernels ran")


def test_a_machine_that_moved_goes_before_all(tmp_path: Path) -> None:
    times = Times()
    before, after = (
        time_row(1, times(), resolved={"recompiles": 0}),
        time_row(1, times(), resolved={"recompiles": 9}),
    )
    assert cause(tmp_path, before, after, control=0.09).name == "control"


def test_without_rows_there_is_no_cause() -> None:
    unit = Unit("group", "", "g", "all", "mean", "", "", "", "lower", Rule("timed", 0.03))
    assert cause_of(unit, SLOWER, math.nan) is None
