"""Sections of single suites: what runs in parallel, what is gathered, what is predicted. Oracles: rows and ratios
that these tests make up; nothing here was measured.
"""

from __future__ import annotations

from dataclasses import replace

from report_fixtures import CPU, figure
from report_pages import machine, run_of, table

from harness.engine.rows import REFUSES as OF_ROWS
from harness.report.parallel import REFUSES, scale_table
from harness.store.case import Case

# Entered only where it was measured

# In parallel

ABOUT = {"sweep": "parallel", "env": CPU, "env_id": "cpu"}


# Predicted


def predictions(world, arm, memory, fits=True):
    case = Case.of("scale", {"model": "llama_tiny", "world": world, "node": 8})
    resolved = {"tokens_per_s": 1000.0, "mfu_mixed": 0.5, "fits": fits}
    values = [("predicted_step_ms", 20.0, ""), ("predicted_step_ms", 3.0, "communication"), ("sent_bytes", 7e9, ""),
              ("predicted_memory_bytes", memory, ""), ("predicted_memory_bytes", 1e9, "activations"),
              ("sent_bytes", 7e9, "weights_forward")]  # fmt: skip
    return [
        replace(figure(case, arm, metric, value, resolved=resolved), part=part)
        for metric, value, part in values
    ]


def test_predicted_steps_in_the_order_of_their_size_of_the_newest_run(tmp_path):
    rows = [
        *predictions(64, "bf16", 9e10, False),
        *predictions(8, "bf16", 5e10),
        *predictions(8, "tensorwise", 6e10),
    ]
    run_of(tmp_path, rows, run_id="20260101T000000Z-0000000-aaaa", **ABOUT)
    made = scale_table(
        run_of(tmp_path, predictions(8, "bf16", 7e10), run_id="20260102T000000Z-0000000-bbbb", **ABOUT)
    )
    assert table(made)[0]["memory (GB)"] == "70.0"
    made = scale_table(machine(tmp_path / "parallel"))
    titles = ("GPUs", "arm", "step (ms)", "exposed (ms)", "memory (GB)", "weights forward (GB)")
    assert [[row[title] for title in titles] for row in table(made)] == [
        ["8", "bf16", "20.00", "3.00", "70.0", "7.00"],
        ["8", "tensorwise", "20.00", "3.00", "60.0", "7.00"],
        ["64", "bf16", "20.00", "3.00", "90.0", "7.00"],
    ]
    memory = [c.title for c in made.columns].index("memory (GB)")
    assert made.rows[2][memory].style == "bad", "more than it has"


def test_what_writes_the_rows_of_a_refusal_and_what_reads_them_agree():
    assert REFUSES == OF_ROWS
