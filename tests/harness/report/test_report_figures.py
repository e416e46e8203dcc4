"""Break-even of compilation. Oracle: arithmetic on the invented rows."""

from __future__ import annotations

import math

import pytest
from matplotlib import rc_context
from report_fixtures import Invented, figure
from report_pages import by_arm, run_of

from harness.report import records, tables
from harness.report.drawing import STYLE, sheet
from harness.store.case import Case


@pytest.mark.parametrize("labels", [1, 5, 6, 18, 40])
def test_a_legend_takes_nothing_from_the_panels(labels):
    """Oracle: the same figure with one label. A row of a panel keeps its height, however many arms there are."""

    def height(count):
        with rc_context(STYLE):
            drawn = sheet("k", 1.72, rows=["a", "b", "c"])
            for i in range(count):
                drawn.axes.plot([0, 1], [0, 1], label=f"an arm of this name {i}")
            drawn.legend()
            drawn.figure.draw_without_rendering()
            return drawn.axes.get_position().height * drawn.figure.get_figheight()

    assert height(labels) == pytest.approx(height(1), abs=0.1)


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
