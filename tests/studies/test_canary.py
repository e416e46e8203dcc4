"""Oracle: what is planted. A name that no torch has, a signature that moved, a count, a figure and an arm that is gone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import canary
import pytest
from gate_fixtures import failed_row, time_row, value_row, write

from harness import store

SOURCE = """
import torch
import torch._dynamo.config as dynamo
from torch._inductor.utils import fresh_cache
from torch._dynamo.utils import counters

def f(x):
    counters.clear()
    dynamo.cache_size_limit = 8
    getattr(torch, "_by_text", None)
    return torch._no_such_name(torch._scaled_mm(x), x._local_tensor)
"""


@pytest.fixture
def names(tmp_path: Path) -> dict[str, list[str]]:
    (tmp_path / "planted.py").write_text(SOURCE)
    return canary.private_names([tmp_path])


def test_private_names_are_found_however_they_are_written(names: dict[str, list[str]]) -> None:
    assert list(names) == [
        "torch._by_text",
        "torch._dynamo.config.cache_size_limit",
        "torch._dynamo.utils.counters",
        "torch._inductor.utils.fresh_cache",
        "torch._no_such_name",
        "torch._scaled_mm",
    ]


def test_a_planted_name_that_torch_lacks_is_named_with_its_place(names: dict[str, list[str]]) -> None:
    expected = {name: canary.signature_of(name) for name in names if name != "torch._no_such_name"}
    assert expected["torch._by_text"] == canary.ABSENT  # absent before: nothing moved
    assert canary.moved_names(names, expected) == [
        "private name gone: torch._no_such_name, used in planted.py:11"
    ]


def test_a_parameter_that_moved_is_named(names: dict[str, list[str]]) -> None:
    expected = {name: canary.signature_of(name) for name in names}
    assert "Tensor scale_a" in expected["torch._scaled_mm"]
    expected["torch._scaled_mm"] = expected["torch._scaled_mm"].replace("scale_a", "scale_x")
    (line,) = canary.moved_names({"torch._scaled_mm": ["a.py:1", "b.py:2"]}, expected)
    assert line.startswith("private name changed: torch._scaled_mm: aten::_scaled_mm(Tensor self, ")
    assert line.endswith("used in a.py:1 and 1 more places")


def test_a_count_a_figure_and_a_lost_arm_are_named(tmp_path: Path) -> None:
    counted = {"operator_calls": 5, "fp8_gemms": 3, "compiled": True}
    before = [
        time_row(1, [1.0], resolved=counted),
        value_row(1, "mismatches", 0.0),
        value_row(2, "sqnr_db", 28.5),
        time_row(3, [1.0]),
        value_row(3, "sqnr_db", 28.5),
    ]
    after = [
        replace(before[0], samples=(9.0,), resolved=counted | {"operator_calls": 6}),  # times are no matter
        value_row(1, "mismatches", 2.0),
        value_row(2, "sqnr_db", 28.5 + 1e-7),
        failed_row(3, "AttributeError: torch._scaled_mm"),
    ]
    a, b = (store.read(write(tmp_path / n, rows)) for n, rows in (("a", before), ("b", after)))
    assert canary.moved_rows(a, a) == []
    first, second, third = canary.moved_rows(a, b)
    assert first.startswith("count moved: operator_calls of gemm/fp8 ")
    assert first.endswith("5 -> 6")
    assert second.startswith("figure moved: mismatches of gemm/fp8 ")
    assert third.startswith("no longer measured: gemm/fp8 ")
    assert third.endswith("AttributeError: torch._scaled_mm")


@pytest.mark.parametrize(
    ("metric", "before", "after", "moved"),
    [
        ("sqnr_db", 28.5, 28.54, False),  # policy: 0.05 dB
        ("sqnr_db", 28.5, 28.46, False),
        ("sqnr_db", 28.5, 28.56, True),
        ("sqnr_db", 28.5, 28.44, True),
        ("sqnr_db", math.inf, math.inf, False),
        ("sqnr_db", math.inf, 60.0, True),
        ("saturated_frac", 0.5, 0.505, False),  # 2 %
        ("saturated_frac", 0.5, 0.52, True),
        ("mismatches", 0.0, 1.0, True),
        ("mismatches", 3e6, 3e6 + 1, True),  # a count is exact
    ],
)
def test_figures_may_differ_by_what_the_gate_allows(
    tmp_path: Path, metric: str, before: float, after: float, moved: bool
) -> None:
    a, b = (
        store.read(write(tmp_path / n, [value_row(1, metric, v)])) for n, v in (("a", before), ("b", after))
    )
    assert bool(canary.moved_rows(a, b)) is moved


def test_the_tree_uses_no_private_name_that_is_gone_or_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The pinned releases are looked at here, newer ones by the scheduled workflow."""
    expected = json.loads(canary.EXPECTED.read_text())
    if expected["versions"] != canary.installed():
        pytest.skip(f"canary.json is of {expected['versions']}")
    code, said = canary.main(["--names"]), capsys.readouterr().out
    assert (code, said.splitlines()[-1][:14]) == (0, "nothing moved:"), said
