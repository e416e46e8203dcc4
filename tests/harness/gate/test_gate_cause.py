"""Oracle: slowdowns whose cause is put in by hand: a clock, a kernel, a host, a compiler, a machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from gate_fixtures import Times, time_row, write

from harness import store
from harness.gate.judge import cause_of
from harness.gate.policy import Rule
from harness.gate.unit import Cause, Key, Unit

SLOWER = math.log(1.10)
AT = [1980.0] * 10


def unit_of(tmp: Path, before: dict[str, Any], after: dict[str, Any], metric: str = "time_ms") -> Unit:
    """Ten per cent slower, with what is said of each side; `times` replaces the times."""
    times = Times()
    sides = []
    for name, said, factor in (("a", before, 1.0), ("b", after, 1.1)):
        row = time_row(
            1, said.get("times") or times(factor), **{k: v for k, v in said.items() if k != "times"}
        )
        sides.append(list(store.read(write(tmp / name, [row])).itertuples(index=False)))
    key = Key("gemm", "id", "fp8", metric, "isolated", "")
    return Unit(key, "1x64x64", "ms", "lower", Rule("timed", 0.03), rows=tuple(sides))


def facts(**resolved: Any) -> dict[str, Any]:
    return {"resolved": resolved}


@pytest.mark.parametrize(
    ("before", "after", "name", "evidence"),
    [
        ({"clocks": AT}, {"clocks": [1800.0] * 10}, "clock", "time +10.0%"),  # the same cycles
        ({"clocks": AT}, {"clocks": AT}, "kernel", "cycles +"),
        (facts(compile_graphs=1), facts(compile_graphs=2), "compile", "compile_graphs 1 -> 2"),
        (
            facts(compile_graph_breaks=1),
            facts(compile_graph_breaks=2),
            "compile",
            "compile_graph_breaks 1 -> 2",
        ),
        (facts(recompiles=1), facts(recompiles=2), "compile", "recompiles 1 -> 2"),
        (facts(operator_calls=12), facts(operator_calls=15), "host", "operators called 12 -> 15"),
        ({"metric": "compile_s"}, {"metric": "compile_s"}, "compile", "compile time +10.0%"),
        ({"metric": "launch_us"}, {"metric": "launch_us"}, "host", "launching kernels takes longer"),
        (
            facts(operator_calls=12, kernels=["old"]),
            facts(operator_calls=12, kernels=["new"]),
            "kernel",
            "the same operators were called; other kernels ran",
        ),
    ],
)
def test_what_was_counted_names_the_cause(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], name: str, evidence: str
) -> None:
    metric = before.get("metric", "time_ms")
    found = cause_of(unit_of(tmp_path, before, after, metric), SLOWER, 0.0)
    assert found is not None
    assert (found.name, evidence in found.evidence) == (name, True), found


def test_a_machine_that_moved_goes_before_all(tmp_path: Path) -> None:
    unit = unit_of(tmp_path, facts(recompiles=0), facts(recompiles=9))
    found = cause_of(unit, SLOWER, 0.09)
    assert found is not None
    assert found.name == "control"
    assert cause_of(unit, SLOWER, 0.04) == Cause("compile", "recompiles 0 -> 9")  # less than half of it
