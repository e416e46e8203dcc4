"""What runs in parallel with what, in report and docs. Oracles: rows written by hand; the published rows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from report_fixtures import CPU, absent, figure, write_run

from harness.engine.rows import REFUSES as OF_ROWS
from harness.report import write_report
from harness.report.compatibility import REFUSES, compiled, main, matrix, page, reasons, sent
from harness.report.gathers import gathers_table
from harness.report.runs import Machine, load
from harness.store.case import Case
from harness.store.cause import Cause
from harness.store.errors import UsageError
from harness.store.measurement import Measurement

ROOT = Path(__file__).parents[3]
DOC = ROOT / "docs" / "compatibility.md"
TWO = {"doc": "a way", "world": 2}


def row(way: str, arm: str, apart: float, bound: float, **resolved: object) -> Measurement:
    case = Case.of("parallel", {"cell": way, "steps": 3})
    return replace(
        figure(case, arm, "loss_deviation", apart), rounds=(2,), resolved={**TWO, "bound": bound, **resolved}
    )


def not_run(way: str, arm: str, status: str, reason: str, cause: Cause = Cause.NONE) -> Measurement:
    case = Case.of("parallel", {"cell": way, "steps": 3})
    return absent(case, arm, status, reason, metric="loss", cause=cause)


ROWS = [
    row("ddp", "no_fp8", 0.0, 0.0, sent_bytes_per_step={"all_reduce float32": 12.0}),
    row(
        "ddp",
        "tensorwise",
        2e-5,
        1e-3,
        sent_bytes_per_step={"all_reduce float32": 12.0},
        emulated="no kernel",
    ),
    not_run("ddp", "static", "failed", "rank 1 of 2: ValueError: bad"),
    row("tp", "no_fp8", 0.0, 1e-6, sent_bytes_per_step={"all_gather uint8": 5.0}),
    not_run("tp", "tensorwise", "skipped", f"{REFUSES}convert first | then cut", Cause.REFUSED),
    not_run("tp", "static", "skipped", "2 ranks need 2 GPUs; here are 1"),
]


def machine(folder: Path, rows: list[Measurement], **more: str) -> Machine:
    write_run(folder, [rows], sweep="parallel", env=CPU, env_id="cpu", **more)
    return load([folder], folder).machines[0]


def test_each_row_is_a_cell_of_the_matrix(tmp_path: Path) -> None:
    table = matrix(machine(tmp_path, ROWS))
    assert [column.title for column in table.columns] == ["way", "ranks", "no_fp8", "tensorwise", "static"]
    cells = [[(cell.text, cell.note, cell.style) for cell in one[2:]] for one in table.rows]
    assert cells == [
        [("runs", "bit for bit", ""), ("runs", "2.0e-05, bound 0.0010", ""), ("failed", "", "bad")],
        [("runs", "bit for bit", ""), ("refuses", "", "muted"), ("unsupported here", "", "muted")],
    ]
    assert [(one[0].text, one[0].note, one[1].text) for one in table.rows] == [
        ("ddp", "a way", "2"),
        ("tp", "a way", "2"),
    ]
    assert REFUSES == OF_ROWS  # what writes the rows and what reads them


def test_a_compiled_way_stands_beside_its_eager_one(tmp_path: Path) -> None:
    rows = []
    for way, value, about in (("fsdp2", 2.0, {}), ("compile", 2.5, {"graphs": 4, "graph_breaks": 0})):
        rows.append(row(way, "tensorwise", 0.0, 0.0, **about))
        rows.append(figure(Case.of("parallel", {"cell": way, "steps": 3}), "tensorwise", "loss", value))
    (cells,) = ([cell.text for cell in one] for one in compiled(machine(tmp_path, rows)).rows)
    assert cells[:2] == ["compile", "tensorwise"]
    assert ["2.5" in cells[2], "2" in cells[3], *cells[4:]] == [True, True, "4", "0"]


def test_reasons_stand_below_and_bytes(tmp_path: Path) -> None:
    own = machine(tmp_path, ROWS)
    said = [[cell.text for cell in one] for one in reasons(own).rows]
    assert said == [
        ["failed", "ddp", "static", "rank 1 of 2: ValueError: bad"],
        ["refuses", "tp", "tensorwise", "convert first | then cut"],
        ["runs, emulated", "ddp", "tensorwise", "no kernel"],
        ["unsupported here", "tp", "static", "2 ranks need 2 GPUs; here are 1"],
    ]
    assert [[cell.text for cell in one] for one in sent(own).rows] == [
        ["ddp", "no_fp8, tensorwise", "", "12"],
        ["tp", "no_fp8", "5", ""],
    ]


def test_the_newest_run_counts(tmp_path: Path) -> None:
    machine(tmp_path, ROWS, run_id="20260101T000000Z-0000000-aaaa")
    newer = machine(tmp_path, [row("ddp", "static", 0.0, 0.0)], run_id="20260102T000000Z-0000000-bbbb")
    assert matrix(newer).rows[0][4].text == "runs"
    assert len(matrix(newer).rows) == 2


def test_report_and_twin_show_it(tmp_path: Path) -> None:
    machine(tmp_path, ROWS)
    written = write_report([tmp_path / "parallel"], tmp_path / "r.html")
    for text in (written.html.read_text(), written.markdown.read_text()):
        assert "What runs in parallel with what" in text
        assert "convert first" in text
        assert text.count("bit for bit") >= 3


def test_the_page_says_what_the_table_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page([machine(tmp_path, ROWS)])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert "| tp; a way | 2 | runs; bit for bit | refuses | unsupported here |" in lines
    assert all(line.count("|") - line.count("\\|") == lines[0].count("|") for line in lines[:4])
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == text
    assert main(["--details", str(tmp_path)]) == 0
    assert "| ddp | no_fp8, tensorwise | all_reduce float32 12 |\n" in capsys.readouterr().out
    with pytest.raises(UsageError, match="no rows of suite parallel"):
        page([])


def gather(arm: str, size: float, **more: str) -> list[Measurement]:
    case = Case.of("allgather", {"ranks": 2, "param_dtype": "bf16"})
    kind = "all_gather uint8" if arm == "fp8" else "all_gather bfloat16"
    rows = [
        replace(figure(case, arm, "wire_bytes", size, **more), part=kind),
        figure(case, arm, "loss", 1.5, **more),
    ]
    rows += [figure(case, arm, "step_ms", 4.0, **more), figure(case, arm, "exposed_ms", 1.0, **more)]
    return [replace(one, resolved={"weights": {"linear": 1000, "other": 8}}) for one in rows]


def test_gathered_bytes_stand_beside_those_of_the_baseline(tmp_path: Path) -> None:
    case = Case.of("allgather", {"ranks": 2, "param_dtype": "bf16"})
    rows = [*gather("bf16", 200.0), *gather("fp8", 101.0, baseline="bf16"),
            absent(case, "torchao", "skipped", f"{REFUSES}torchao failed", "bf16", metric="loss")]  # fmt: skip
    table = gathers_table(machine(tmp_path, rows))
    assert [[cell.text for cell in one[2:5]] for one in table.rows] == [
        ["bf16", "200", "1.000"], ["fp8", "101", "0.5050"], ["torchao", "skipped", ""]
    ]  # fmt: skip
    assert "1,000 weights" in table.caption


def test_the_pages_in_docs_are_what_the_published_rows_say() -> None:
    """Run `make published` where this fails."""
    material = load([ROOT / "results" / "published"], ROOT)
    assert DOC.read_text() == page(material.machines)
    assert DOC.with_name("compatibility-details.md").read_text() == page(material.machines, details=True)


def test_every_cell_of_the_published_matrix_was_run() -> None:
    """At least 40 of them executed, and none without a row."""
    material = load([ROOT / "results" / "published"], ROOT)
    own = next(m for m in material.machines if "parallel" in m.suites)
    cells = [cell for one in matrix(own).rows for cell in one[2:]]
    assert all(cell.text for cell in cells)
    assert sum(cell.text == "runs" for cell in cells) >= 40
    ways = {one[0].text for one in matrix(own).rows}
    assert {"ddp", "fsdp2", "hsdp", "tp", "sp", "ep", "pp", "compile", "checkpointing", "accumulation", "offload",
            "schedule"} <= ways  # fmt: skip
    assert not re.search(r"/(home|tmp|root|work|Users)/", DOC.read_text())
