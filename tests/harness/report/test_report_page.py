"""What stands on the page of a report. Oracle: the rows behind it, none of which is hidden."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from report_cases import cast_cases, ceiling_cases, tiny_run
from report_fixtures import Invented, write_run
from report_pages import Page, machine, run_of

from harness import store
from harness.report import records, tables, write_report
from harness.store.case import Case

# What stands on the page


def test_nothing_failed_or_skipped_is_hidden(gpu):
    """Oracle: the store; a reason stands once, with every arm that it holds for."""
    page = Page(gpu[1].html.read_text()).text
    rows = store.read(gpu[0])
    bad = rows[rows["status"] != "ok"]
    found = tables.troubles_table(machine(gpu[0])).rows
    told = {(*(c.text for c in row[:4]), arm) for row in found for arm in row[4].text.split(", ")}
    stored = zip(*(bad[c] for c in ("status", "suite", "metric", "reason", "arm")), strict=True)
    assert told == set(stored)
    assert len(found) == len({t[:4] for t in told}) < len(told)
    reason = "K=4104 is no multiple of 16, which FP8 GEMMs need"
    assert [row[3].text for row in found].count(reason) == 1
    assert reason in page
    assert "odd output 8192x4104x4096" in page


def test_every_row_and_every_case_is_there(gpu):
    """Oracle: the store. Quartiles are numpy's, over all samples."""
    rows = store.read(gpu[0])
    table = tables.rows_table(machine(gpu[0]))
    assert len(table.rows) == len(rows)
    titles = [c.title for c in table.columns]
    for cells, samples in zip(table.rows, rows["samples"], strict=True):
        got = dict(zip(titles, cells, strict=True))
        assert got["samples"].order == len(samples)
        if len(samples):
            assert [got["q1"].order, got["q3"].order] == pytest.approx(
                np.quantile(samples, [0.25, 0.75]).tolist()
            )
    page = gpu[1].html.read_text()
    assert all(case_id in page for case_id in set(rows["case_id"]))


def test_conditions_and_command_are_on_the_page(gpu):
    page = Page(gpu[1].html.read_text()).text
    for condition in (
        "NVIDIA H200",
        "power limit 700 W",
        "570.124.06",
        "2.13.0+cu128",
        "3.7.1",
        "commit 0123456",
    ):
        assert condition in page
    assert "python -m harness sweep=quick" in page
    assert "absent or unreadable HIP, torchao" in page
    assert "median 1,755 MHz" in page


def test_data_is_linked_by_relative_path_and_checksum(gpu):
    """Oracle: hashlib over the file that the link leads to."""
    report = gpu[1].html
    found = re.findall(r'<a href="([^"]*\.parquet)">.*?sha256 ([0-9a-f]{64})', report.read_text())
    assert len(found) == len(list(gpu[0].glob("*.parquet")))
    for href, digest in found:
        assert not Path(href).is_absolute()
        assert hashlib.sha256((report.parent / unquote(href)).read_bytes()).hexdigest() == digest


def test_cast_share_is_of_the_measured_copy(gpu):
    """By hand: the invented copy takes 3 us + bytes / (0.88 * 4200 GB/s); the curve is read between its sizes."""
    found = machine(gpu[0])
    curve = found.ceilings.moves["copy"]
    assert [size for size, _ in curve] == [2.0**p for p in range(20, 33, 2)]
    for size, rate in curve:
        assert rate == pytest.approx(size / (0.003e-3 + size / (0.88 * 4200e9)), rel=0.05)
    shares = [r["copy_share"] for r in records.arm_records(found, "cast") if r["arm"] == "eager"]
    assert len(shares) == 16
    assert all(0.1 < share < 0.5 for share in shares)


def test_share_of_peak_by_hand(tmp_path):
    """By hand from the data sheet: 989 bf16 and 1979 FP8 TFLOP/s dense, 4.8 TB/s; drift of the rounds divided out."""
    case = Case.of("linear", {"M": 16})
    arms = {
        "bf16": {"ms": 2.0, "flops": {"bf16": 0.989e12}},
        "mixed": {"ms": 4.0, "flops": {"bf16": 1e12, "e4m3": 1.5e12, "e5m2": 0.5e12}},
        "copy": {"ms": 1.0, "bytes": 2.4e9},
        "unknown": {"ms": 1.0, "flops": {"int8": 1e12}},
        "impossible": {"ms": 1.0, "flops": {"bf16": 5e12}},
    }
    run = run_of(tmp_path, Invented(spread=0.0).times(case, arms))
    table = tables.suite_table(run, "linear")
    column = [c.title for c in table.columns].index("of peak")
    found = records.arm_records(run, "linear")
    share = {r["arm"]: r["peak_share"] * r["value"] / float(arms[r["arm"]]["ms"]) for r in found}
    assert share["bf16"] == pytest.approx(0.5)
    assert share["mixed"] == pytest.approx((1 / 989 + 2 / 1979) * 1e3 / 4)
    assert share["copy"] == pytest.approx(0.5)
    cells = {r["arm"]: row[column] for r, row in zip(found, table.rows, strict=True)}
    assert cells["unknown"].text == "N/A"
    assert (cells["impossible"].style, cells["impossible"].note) == (
        "bad",
        "above the peak at the measured clock",
    )
    assert cells["bf16"].style == ""


def test_a_suite_that_nobody_knew_gets_a_table(tmp_path):
    case = Case.of("broadcast", {"world": 8, "bytes": 1024, "dtype": "e4m3fn"})
    run = write_run(tmp_path, [Invented().times(case, {"nccl": {"ms": 0.25, "bytes": 1e6}})])
    page = Page(write_report([run], tmp_path / "r.html").html.read_text()).text
    assert "Broadcast" in page
    assert "0.25" in page


def test_squares_show_every_cell(gpu, cpu):
    for folder in (gpu[0], cpu[0]):
        for grid in tables.square_grids(machine(folder)):
            assert [len(row) for row in grid.table.rows] == [3] * 4
            assert all(cell.text for row in grid.table.rows for cell in row)
    without_compiler = tables.square_grids(machine(cpu[0]))
    notes = [cell.note for grid in without_compiler for row in grid.table.rows for cell in row]
    assert notes.count("no C++ compiler: torch.compile needs one") == 4 * len(without_compiler)


def test_two_machines_stand_apart(whole):
    """The GPU first; each with its own answers and environment; no ratio crosses them."""
    page = Page(whole.html.read_text())
    assert page.text.count("Is FP8 faster here?") == 4  # on each first screen, and where its grounds are
    assert page.text.index("NVIDIA H200") < page.text.index("AMD EPYC")
    assert len(page.ids) == len(set(page.ids))
    assert "commits 0123456; fffffff" in page.text
    assert whole.html.stat().st_size < 2e6


def test_runs_of_one_machine_are_read_together(tmp_path):
    """`make gpu` leaves a run a sweep; casts are then read against the ceilings of the other run."""
    invented = Invented()
    runs = [
        write_run(
            tmp_path,
            ceiling_cases(invented, 4200.0, 740.0),
            sweep="ceilings",
            run_id="20260102T000000Z-0123456-aaaa",
        ),
        write_run(
            tmp_path, cast_cases(invented, 4200.0), sweep="cast", run_id="20260102T000100Z-0123456-bbbb"
        ),
    ]
    found = machine(*runs)
    assert [r.sweep for r in found.runs] == ["ceilings", "cast"]
    assert "of copy" in [c.title for c in tables.suite_table(found, "cast").columns]


@pytest.mark.parametrize("state", ["interrupted", "failed", "running"])
def test_an_unfinished_run_says_so(tmp_path, state):
    run = tiny_run(tmp_path, state=state)
    written = write_report([run], tmp_path / "r.html")
    page = Page(written.html.read_text()).text
    note = {"interrupted": "was interrupted", "failed": "ended early", "running": "has not ended"}[state]
    assert page.index(note) < page.index("Is FP8 faster here?")
    assert note in written.markdown.read_text()


def test_a_corrupt_part_is_named_and_the_others_are_read(tmp_path):
    run = tiny_run(tmp_path)
    rows = len(store.read(run))
    (run / "part-corrupt.parquet").write_bytes(b"PAR1 not really")
    written = write_report([run], tmp_path / "r.html")
    assert len(written.problems) == 1
    assert "part-corrupt.parquet" in written.problems[0]
    page = Page(written.html.read_text()).text
    assert f"Every stored row ({rows})" in page
    assert page.index("part-corrupt.parquet") < page.index("Is FP8 faster here?")


def test_a_run_without_run_json_is_still_reported(tmp_path):
    run = tiny_run(tmp_path)
    (run / "_run.json").unlink()
    assert "has no readable _run.json" in Page(write_report([run], tmp_path / "r.html").html.read_text()).text
