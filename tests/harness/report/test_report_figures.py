"""Figures of the report, and break-even of compilation. Oracles: arithmetic on the invented rows, data sheets."""

from __future__ import annotations

import math
import re

import pytest
from report_cases import ceiling_cases, gemm_cases, linear_cases
from report_fixtures import Invented, absent, figure
from report_pages import by_arm, run_of

from harness.report import charts, records, tables
from harness.report.drawing import EDGES
from harness.report.verdicts import fp8_pairs
from harness.store.case import Case


def product(ms, m=16, k=32, n=64, invented=None, **axes):
    arms = {
        "bf16": {"ms": 2.0, "flops": {"bf16": 1.0}},
        "fp8": {"ms": ms, "flops": {"e4m3": 1.0}, "baseline": "bf16"},
    }
    case = Case.of("gemm", {"M": m, "K": k, "N": n, **axes})
    return (invented or Invented(spread=0.0)).times(case, arms)


def test_a_map_holds_the_speedup_of_each_shape(tmp_path):
    """Oracle: the paired ratios. K and N of a case choose its cell, and the ratio its colour."""
    found = run_of(tmp_path, *linear_cases(Invented(), 690.0))
    pairs = [p for p in fp8_pairs(found) if p["regime"] == "isolated" and p["arm"].endswith("_compile")]
    ratios = {(p["arm"], *map(int, re.findall(r'"[KN]":(\d+)', p["axes"]))): p["speedup"] for p in pairs}
    grids = tables.heat_maps(found, "linear")
    assert {g.name for g in grids} == {"M = 8192"}
    assert [g.group for g in grids] == ["tensorwise_compile", "rowwise_compile", "rowwise_with_gw_hp_compile"]
    seen = {}
    for grid in grids:
        for k, *cells in grid.table.rows:
            for column, cell in zip(grid.table.columns[1:], cells, strict=True):
                if cell.text:
                    seen[grid.group, int(k.text), int(column.title)] = float(cell.text)
                    low, high = (0, *EDGES)[int(cell.style[1])], (*EDGES, math.inf)[int(cell.style[1])]
                    assert low <= cell.order <= high
    assert seen == pytest.approx(ratios, rel=5e-3)
    assert len(seen) == 15


def test_maps_average_cases_of_one_shape(tmp_path):
    """By hand: 2x and 8x on one shape make 4x. A single shape is no map."""
    cases = [
        product(ms, n=n, data=data) for data, ms in (("randn", 1.0), ("uniform", 0.25)) for n in (64, 128)
    ]
    (grid,) = tables.heat_maps(run_of(tmp_path / "two", *cases), "gemm")
    assert [[c.text for c in row] for row in grid.table.rows] == [["32", "4.00", "4.00"]]
    assert tables.heat_maps(run_of(tmp_path / "one", cases[0]), "gemm") == []


def test_the_square_is_whole_and_never_crosses_eager_and_compile(tmp_path):
    """A cell without a time says why. What compiling gains stays out: bf16_compile has bf16_eager as its baseline."""
    case = Case.of("linear", {"M": 16})
    times = {"bf16_eager": (4.0, ""), "bf16_compile": (2.0, "bf16_eager"), "tensorwise_eager": (8.0, "bf16_eager"),
             "tensorwise_compile": (1.0, "bf16_compile")}  # fmt: skip
    arms = {arm: {"ms": ms, "baseline": base} for arm, (ms, base) in times.items()}
    rows = [
        *Invented(spread=0.0).times(case, arms),
        absent(case, "rowwise_compile", "skipped", "no compiler", "bf16_compile"),
    ]
    (grid,) = tables.square_grids(run_of(tmp_path, rows))
    cells = {
        row[0].text: [(cell.text.split(".")[0], cell.note) for cell in row[1:]] for row in grid.table.rows
    }
    assert list(cells) == ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
    assert cells["rowwise"] == [("not measured in this run", ""), ("skipped", "no compiler")]
    assert [note for _, note in cells["bf16"]] == ["", ""]
    assert [note[:6] for _, note in cells["tensorwise"]] == ["0.500x", "2.00x "]


def test_the_roofline_has_measured_and_published_ceilings(tmp_path):
    """Oracles: the data sheet of the H200, and the invented ceilings (1.02 and 1.9 times 740 TFLOP/s)."""
    invented = Invented()
    found = run_of(tmp_path, *gemm_cases(invented, 720.0), *ceiling_cases(invented, 4200.0, 740.0))
    measured, nominal = charts._ceilings(found)
    assert measured == pytest.approx({"bf16": 1.02 * 740, "fp8": 1.9 * 740, "copy": 0.88 * 4.2}, rel=0.05)
    assert nominal == {"bf16": 989.0, "fp8": 1979.0, "copy": 4.8}
    (chart,) = charts.roofline(found)
    for label in ("measured", "published peak"):
        assert all(f"{kind}, {label}" in chart.svg for kind in ("bf16", "fp8"))
    assert "Full lines: the best matmul rates" in chart.caption
    assert "not measured" not in chart.caption


def test_break_even_by_hand(tmp_path):
    """40 s cold and 8 s warm, 2 ms gained a call: 20,000 and 4,000 calls. An arm that gains nothing never pays."""
    case = Case.of("linear", {"M": 16, "K": 32, "N": 48})
    ms = {
        "tensorwise_eager": 5.0,
        "tensorwise_compile": 3.0,
        "rowwise_eager": 1.0,
        "rowwise_compile": 2.0,
        "delayed_compile": 1.0,
    }
    rows = Invented(spread=0.0).times(case, {arm: {"ms": value} for arm, value in ms.items()})
    for arm in ("tensorwise_compile", "rowwise_compile", "delayed_compile"):
        cold = {"compile_cache": "cold", "compile_graphs": 1}
        rows += [
            figure(case, arm, "compile_s", 40.0, resolved=cold),
            figure(case, arm, "compile_s", 8.0, part="warm"),
        ]
    found = run_of(tmp_path, rows)
    about = {arm: own for (_, _, arm), own in records.compilations(found).items()}
    drift = found.frame.set_index("arm")["value"]["tensorwise_compile"].iloc[0] / 3.0
    pays = [about["tensorwise_compile"][f"{which}_pays"] for which in ("cold", "warm")]
    assert pays == pytest.approx([20000 / drift, 4000 / drift], rel=1e-3)
    assert (about["rowwise_compile"]["cold_pays"], "cold_pays" in about["delayed_compile"]) == (
        math.inf,
        False,
    )
    shown = by_arm(tables.compile_times(found))
    assert [shown[arm]["pays after (calls)"] for arm in ("rowwise_compile", "delayed_compile")] == [
        "never",
        "",
    ]


def test_steps_of_different_batches_are_no_pair(tmp_path):
    case = Case.of("train", {"model": "nano"})
    arms = {
        f"bf16_{mode}": {"ms": 4.0, "resolved": {"tokens_per_step": tokens}}
        for mode, tokens in (("eager", 512), ("compile", 1024))
    }
    rows = [*Invented().times(case, arms), figure(case, "bf16_compile", "compile_s", 30.0)]
    (about,) = records.compilations(run_of(tmp_path, rows)).values()
    assert "cold_pays" not in about
