"""Sections of single suites. Oracle: the room that writes their rows."""

from __future__ import annotations

from report_fixtures import absent, figure
from report_pages import run_of, table

from harness.engine.rows import REFUSES as OF_ROWS
from harness.report.parallel import REFUSES, gathers_table
from harness.store.case import Case


def test_what_writes_the_rows_of_a_refusal_and_what_reads_them_agree():
    assert REFUSES == OF_ROWS


def test_what_ranks_send_is_told_of_whoever_was_counted_and_no_loss_is_the_same_that_was_not_compared(
    tmp_path,
):
    """Oracle: the planted bytes. An arm in one process sends nothing and has no row."""
    case, alone = (Case.of("train", {"model": "llama_tiny", "ranks": ranks}) for ranks in (2, 1))
    in_fp8 = {"weights_gathered_as": ["fp8", "high precision: its output is no multiple of 16"]}

    def counted(arm, gathered, **more):
        sent = {"all_gather": gathered, "reduce_scatter": 40.0}
        return [
            figure(case, arm, "wire_bytes", size, part=f"{name} float32", **more)
            for name, size in sent.items()
        ] + [figure(case, arm, "collectives", 2.0, part="all_reduce float32", **more)]

    fp8 = {"baseline": "bf16_eager", "resolved": in_fp8}
    rows = [
        *counted("bf16_eager", 80.0, resolved={"weights_gathered_as": ["float32"]}),
        *counted("tensorwise_eager", 20.0, **fp8),
        figure(case, "tensorwise_eager", "loss_deviation", 0.0, **fp8),
        *counted("rowwise_eager", 60.0, **fp8),
        figure(case, "rowwise_eager", "loss_deviation", 1e-6, **fp8),
        absent(case, "tensorwise_compile", "skipped", "not seen", metric="wire_bytes"),
        figure(case, "tensorwise_compile", "time_ms", 1.0),
        absent(alone, "tensorwise_eager", "skipped", "no peak", metric="peak_memory_bytes"),
    ]
    found = {row.pop("arm"): row for row in table(gathers_table(run_of(tmp_path, rows)))}
    ratios = {
        arm: (row["all-gather (bytes)"], row["of the baseline's"], row["same loss"])
        for arm, row in found.items()
    }
    assert ratios == {
        "bf16_eager": ("80", "1.000", ""),
        "tensorwise_eager": ("20", "0.2500", "yes"),
        "rowwise_eager": ("60", "0.7500", "1.0e-06 apart"),
        "tensorwise_compile": ("skipped", "", ""),
    }
    fp8_row = found["tensorwise_eager"]
    assert (fp8_row["all-reduces"], fp8_row["reduce-scatter (bytes)"]) == ("2", "40")
    assert [row["weights as"] for row in found.values()][:2] == ["float32", "fp8, high precision"]
