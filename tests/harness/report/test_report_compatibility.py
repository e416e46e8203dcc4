"""What runs in parallel with what, and what is gathered. Oracles: rows written by hand."""

from __future__ import annotations

from dataclasses import replace

from report_fixtures import CPU, absent, figure, write_run
from report_pages import run_of, table

from harness.engine.rows import REFUSES as OF_ROWS
from harness.report import write_report
from harness.report.compatibility import REFUSES, matrix, reasons
from harness.report.gathers import gathers_table
from harness.store.case import Case
from harness.store.cause import Cause

ABOUT = {"sweep": "parallel", "env": CPU, "env_id": "cpu"}


def way(name):
    return Case.of("parallel", {"cell": name, "steps": 3})


def ran(name, arm, apart, bound, **more):
    made = figure(way(name), arm, "loss_deviation", apart)
    return replace(made, rounds=(2,), resolved={"doc": "a way", "world": 2, "bound": bound, **more})


def not_run(name, arm, status, reason, cause=Cause.NONE):
    return absent(way(name), arm, status, reason, metric="loss", cause=cause)


ROWS = [
    ran("ddp", "no_fp8", 0.0, 0.0),
    ran("ddp", "tensorwise", 2e-5, 1e-3, emulated="no kernel"),
    not_run("ddp", "static", "failed", "rank 1 of 2: ValueError: bad"),
    ran("tp", "no_fp8", 0.0, 1e-6),
    not_run("tp", "tensorwise", "skipped", f"{REFUSES}convert first | then cut", Cause.REFUSED),
    not_run("tp", "static", "skipped", "2 ranks need 2 GPUs; here are 1"),
]


def test_each_row_is_a_cell_of_the_matrix_with_its_reason_below(tmp_path):
    """A later run that has one of the cells counts for that one."""
    found = run_of(tmp_path, ROWS, run_id="20260101T000000Z-0000000-aaaa", **ABOUT)
    made = matrix(found)
    assert [column.title for column in made.columns] == ["way", "ranks", "no_fp8", "tensorwise", "static"]
    assert [[(cell.text, cell.note, cell.style) for cell in row[2:]] for row in made.rows] == [
        [("runs", "bit for bit", ""), ("runs", "2.0e-05, bound 0.0010", ""), ("failed", "", "bad")],
        [("runs", "bit for bit", ""), ("refuses", "", "muted"), ("unsupported here", "", "muted")],
    ]
    assert [(row[0].text, row[0].note, row[1].text) for row in made.rows] == [
        ("ddp", "a way", "2"),
        ("tp", "a way", "2"),
    ]
    assert [tuple(row.values()) for row in table(reasons(found))] == [
        ("failed", "ddp", "static", "rank 1 of 2: ValueError: bad"),
        ("refuses", "tp", "tensorwise", "convert first | then cut"),
        ("runs, emulated", "ddp", "tensorwise", "no kernel"),
        ("unsupported here", "tp", "static", "2 ranks need 2 GPUs; here are 1"),
    ]
    assert REFUSES == OF_ROWS  # what writes the rows and what reads them
    later = [ran("ddp", "static", 0.0, 0.0)]
    write_run(tmp_path, [later], run_id="20260102T000000Z-0000000-bbbb", **ABOUT)
    written = write_report([tmp_path / "parallel"], tmp_path / "r.html")
    assert "| ddp; a way | 2 | runs; bit for bit | runs; 2.0e-05, bound 0.0010 | runs; bit for bit |" in (
        written.markdown.read_text()
    )


def test_gathered_bytes_stand_beside_those_of_the_baseline(tmp_path):
    case = Case.of("allgather", {"ranks": 2, "param_dtype": "bf16"})
    rows = [absent(case, "torchao", "skipped", f"{REFUSES}torchao failed", "bf16", metric="loss")]
    for arm, size, more in (("fp8", 101.0, {"baseline": "bf16"}), ("bf16", 200.0, {})):
        kind = "all_gather uint8" if arm == "fp8" else "all_gather bfloat16"
        own = [replace(figure(case, arm, "wire_bytes", size, **more), part=kind)]
        own += [
            figure(case, arm, name, value, **more)
            for name, value in (("loss", 1.5), ("step_ms", 4.0), ("exposed_ms", 1.0))
        ]
        rows = [replace(one, resolved={"weights": {"linear": 1000, "other": 8}}) for one in own] + rows
    made = gathers_table(run_of(tmp_path, rows, **ABOUT))
    titles = ("arm", "all-gather (bytes)", "of the baseline's", "last loss", "exposed (ms)")
    assert [[row.get(title, "") for title in titles] for row in table(made)] == [
        ["bf16", "200", "1.000", "1.500000", "1.00"],
        ["fp8", "101", "0.5050", "1.500000", "1.00"],
        ["torchao", "skipped", "", "", ""],
    ]
    assert "1,000 weights" in made.caption
