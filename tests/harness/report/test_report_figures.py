"""Figures of the report. Oracles: arithmetic on the invented rows, and the definition of each figure."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from report_cases import ceiling_cases, gemm_cases, linear_cases, train_cases
from report_fixtures import CPU, Invented, figure, write_run
from report_pages import machine, table

from harness.report import charts, compile_break_even, outliers, roofline, tables
from harness.report.drawing import standalone
from harness.report.heatmap import EDGES, MOST_M, MOST_SIDE, heat_maps
from harness.report.verdicts import fp8_pairs
from harness.store.case import Case

# Heat maps


def test_a_map_holds_the_speedup_of_each_shape(tmp_path: Path) -> None:
    """Oracle: the paired ratios. K and N of a case choose its cell, and the ratio its colour."""
    found = machine(write_run(tmp_path, linear_cases(Invented(), 690.0)))
    pairs = fp8_pairs(found)
    ratio = {
        (r.arm, r.axes): r.speedup
        for r in pairs[pairs["regime"] == "isolated"].itertuples()
        if r.arm.endswith("_compile")
    }
    grids = heat_maps(found, "linear")
    assert [g.group for g in grids] == ["tensorwise_compile", "rowwise_compile", "rowwise_with_gw_hp_compile"]
    seen = 0
    for grid in grids:
        assert grid.name == "M = 8192"
        columns = [c.title for c in grid.table.columns[1:]]
        for k, *cells in grid.table.rows:
            for n, cell in zip(columns, cells, strict=True):
                if not cell.text:
                    continue
                (value,) = (
                    v
                    for (arm, axes), v in ratio.items()
                    if arm == grid.group and f'"K":{k.text},' in axes and f'"N":{n},' in axes
                )
                assert float(cell.text) == pytest.approx(value, rel=5e-3)
                low, high = (0, *EDGES)[int(cell.style[1])], (*EDGES, math.inf)[int(cell.style[1])]
                assert low <= value <= high
                seen += 1
    assert seen == len(ratio) == 15


def test_several_cases_of_one_shape_are_their_geometric_mean(tmp_path: Path) -> None:
    """By hand: 2x and 8x on one shape make 4x."""
    cases = []
    for data, ms in (("randn", 1.0), ("uniform", 0.25)):
        for n in (64, 128):
            case = Case.of("gemm", {"data": data, "M": 16, "K": 32, "N": n})
            arms = {
                "bf16": {"ms": 2.0, "flops": {"bf16": 1.0}},
                "fp8": {"ms": ms, "flops": {"e4m3": 1.0}, "baseline": "bf16"},
            }
            cases.append(Invented(spread=0.0).times(case, arms))
    (grid,) = heat_maps(machine(write_run(tmp_path, cases)), "gemm")
    assert [[c.text for c in row] for row in grid.table.rows] == [["32", "4.00", "4.00"]]


def test_large_grids_are_thinned_evenly_and_one_shape_is_no_map(tmp_path: Path) -> None:
    invented = Invented(rounds=3, samples=1)
    cases = []
    for i in range(20 * 6):
        case = Case.of("gemm", {"M": 16 * (1 + i % 6), "K": 16 * (1 + i // 6), "N": 64})
        arms = {
            "bf16": {"ms": 2.0, "flops": {"bf16": 1.0}},
            "fp8": {"ms": 1.0, "flops": {"e4m3": 1.0}, "baseline": "bf16"},
        }
        cases.append(invented.times(case, arms))
    grids = heat_maps(machine(write_run(tmp_path / "many", cases)), "gemm")
    assert [g.name for g in grids] == ["M = 16", "M = 48", "M = 64", "M = 96"]
    assert len(grids) == MOST_M
    ks = [int(row[0].text) for row in grids[0].table.rows]
    assert len(ks) == MOST_SIDE
    assert (ks[0], ks[-1]) == (16, 320)
    assert heat_maps(machine(write_run(tmp_path / "one", cases[:1])), "gemm") == []


# Roofline


def test_the_roofline_has_measured_and_published_ceilings(tmp_path: Path) -> None:
    """Oracles: the data sheet of the H200, and the invented ceilings (1.02 and 1.9 times 740 TFLOP/s)."""
    invented = Invented()
    found = machine(write_run(tmp_path, gemm_cases(invented, 720.0) + ceiling_cases(invented, 4200.0, 740.0)))
    measured, nominal = roofline._measured(found), roofline._nominal(found)
    assert measured["bf16"] == pytest.approx(1.02 * 740, rel=0.03)
    assert measured["fp8"] == pytest.approx(1.9 * 740, rel=0.03)
    assert measured["copy"] == pytest.approx(0.88 * 4.2, rel=0.05)
    assert nominal == {"bf16": 989.0, "fp8": 1979.0, "copy": 4.8}
    (chart,) = roofline.roofline(found)
    for label in (
        "bf16, measured",
        "fp8, measured",
        "bf16, published peak",
        "fp8, published peak",
        "bf16 GEMMs",
    ):
        assert label in chart.svg
    assert "Full lines: the best matmul rates" in chart.caption
    assert "not measured" not in chart.caption


# Outliers


def test_outliers_are_drawn_by_their_size_and_by_gemm(tmp_path: Path) -> None:
    rows = []
    for role in ("output", "grad_input"):
        for i, data in enumerate(("randn", "outliers_1e2", "outliers_1e5", "zeros")):
            case = Case.of("outliers", {"data": data, "role": role, "M": 128, "K": 4096, "N": 128})
            for arm in ("tensorwise", "rowwise"):
                rows.append(figure(case, arm, "bulk_sqnr_db", 28.0 - 5 * i))
    (chart,) = outliers.outliers(machine(write_run(tmp_path, [rows], env=CPU)))
    assert re.findall(r">(output|grad_input)</text>", chart.svg) == ["output", "grad_input"]
    assert all(f">{name}</text>" in chart.svg for name in ("none", "100x", "1e5x", "tensorwise", "rowwise"))
    assert "zeros" not in chart.svg


# Break-even of compilation


def test_break_even_by_hand(tmp_path: Path) -> None:
    """40 s cold and 8 s warm, 2 ms gained a call: 20,000 and 4,000 calls. An arm that gains nothing never pays."""
    case = Case.of("linear", {"M": 16, "K": 32, "N": 48})
    arms = {
        "tensorwise_eager": {"ms": 5.0}, "tensorwise_compile": {"ms": 3.0},
        "rowwise_eager": {"ms": 1.0}, "rowwise_compile": {"ms": 2.0},
        "delayed_compile": {"ms": 1.0},
    }  # fmt: skip
    rows = Invented(spread=0.0).times(case, arms)
    for arm in ("tensorwise_compile", "rowwise_compile", "delayed_compile"):
        rows.append(
            figure(case, arm, "compile_s", 40.0, resolved={"compile_cache": "cold", "compile_graphs": 1})
        )
        rows.append(figure(case, arm, "compile_s", 8.0, part="warm"))
    found = machine(write_run(tmp_path, [rows]))
    by_arm = {arm: about for (_, _, arm), about in compile_break_even.compilations(found).items()}
    drift = found.frame.set_index("arm")["value"]["tensorwise_compile"].iloc[0] / 3.0
    assert by_arm["tensorwise_compile"]["gain_s"] == pytest.approx(2e-3 * drift, rel=1e-3)
    assert by_arm["tensorwise_compile"]["cold_pays"] == pytest.approx(20000 / drift, rel=1e-3)
    assert by_arm["tensorwise_compile"]["warm_pays"] == pytest.approx(4000 / drift, rel=1e-3)
    assert by_arm["rowwise_compile"]["cold_pays"] == math.inf
    assert "cold_pays" not in by_arm["delayed_compile"]
    pays = {r["arm"]: r["pays after (calls)"] for r in table(tables.compile_times(found))}
    assert (pays["rowwise_compile"], pays["delayed_compile"]) == ("never", "")


def test_steps_of_different_batches_are_no_pair(tmp_path: Path) -> None:
    case = Case.of("train", {"model": "nano"})
    arms = {
        "bf16_eager": {"ms": 4.0, "resolved": {"tokens_per_step": 512}},
        "bf16_compile": {"ms": 3.0, "resolved": {"tokens_per_step": 1024}},
    }
    rows = [*Invented().times(case, arms), figure(case, "bf16_compile", "compile_s", 30.0)]
    (about,) = compile_break_even.compilations(machine(write_run(tmp_path, [rows]))).values()
    assert "cold_pays" not in about


# All of them


def test_a_figure_of_its_own_has_its_colours(tmp_path: Path) -> None:
    """Every variable that is used is defined, light and dark; ids are the figure's own."""
    css = (Path(charts.__file__).parent / "page.css").read_text()
    found = machine(write_run(tmp_path, train_cases(Invented())))
    for chart in charts.speedups(found):
        source = standalone(chart, css)
        assert source.startswith("<svg ")
        assert "<title>Speedup by shape: train</title>" in source
        used = set(re.findall(r"var\((--[\w-]+)\)", source))
        for block in re.findall(r"svg \{(.*?)\}", source):
            assert used <= set(re.findall(r"(--[\w-]+): #", block))
