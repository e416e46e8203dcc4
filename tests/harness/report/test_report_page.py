"""What stands on the page of a report. Oracle: the rows behind it, none of which is hidden."""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from report_cases import cast_cases, ceiling_cases, tiny_run, train_cases
from report_fixtures import Invented, write_run
from report_pages import Page, machine, run_of

import harness
from harness import store
from harness.report import facts, records, section, tables, write_report
from harness.report import table as columns_of
from harness.store.case import Case
from harness.store.measurement import METRICS


def test_every_row_and_every_case_is_there(gpu, gpu_machine):
    """Oracle: the store. Quartiles are numpy's, over all samples."""
    rows = store.read(gpu[0])
    made = tables.rows_table(gpu_machine)
    titles = [c.title for c in made.columns]
    for cells, samples in zip(made.rows, rows["samples"], strict=True):
        got = {title: cell.order for title, cell in zip(titles, cells, strict=True)}
        assert got["samples"] == len(samples)
        if len(samples):
            assert [got["q1"], got["q3"]] == pytest.approx(np.quantile(samples, [0.25, 0.75]).tolist())
    page = gpu[1].html.read_text()
    assert all(case_id in page for case_id in set(rows["case_id"]))


def test_conditions_command_and_data_are_on_the_page(gpu):
    """Data by relative link and checksum. Oracle: hashlib over the file that the link leads to."""
    page = Page(gpu[1].html.read_text()).text
    conditions = ("NVIDIA H200", "power limit 700 W", "570.124.06", "2.13.0+cu128", "3.7.1", "commit 0123456")
    others = ("python -m harness sweep=quick", "absent or unreadable HIP, torchao", "median 1,755 MHz")
    assert [word for word in (*conditions, *others) if word not in page] == []
    report = gpu[1].html
    found = re.findall(r'<a href="([^"]*\.parquet)">.*?>([0-9a-f]{64})<', report.read_text())
    assert len(found) == len(list(gpu[0].glob("*.parquet")))
    for href, digest in found:
        assert not Path(href).is_absolute()
        assert hashlib.sha256((report.parent / unquote(href)).read_bytes()).hexdigest() == digest


def test_axes_of_one_case_stand_in_the_caption(tmp_path):
    made = tables.suite_table(machine(write_run(tmp_path, train_cases(Invented())[:1])), "train")
    assert {"model", "batch"}.isdisjoint(c.title for c in made.columns)
    assert "model llama3_1b" in made.caption


def test_shares_of_copy_and_of_peak_by_hand(tmp_path, gpu_machine):
    """By hand from the data sheet: 989 bf16 and 1979 FP8 TFLOP/s dense, 4.8 TB/s; drift of the rounds divided out."""
    shares = [r["copy_share"] for r in records.arm_records(gpu_machine, "cast") if r["arm"] == "eager"]
    assert len(shares) == 16
    assert all(0.1 < share < 0.5 for share in shares)
    arms = {
        "bf16": {"ms": 2.0, "flops": {"bf16": 0.989e12}},
        "mixed": {"ms": 4.0, "flops": {"bf16": 1e12, "e4m3": 1.5e12, "e5m2": 0.5e12}},
        "copy": {"ms": 1.0, "bytes": 2.4e9},
        "unknown": {"ms": 1.0, "flops": {"int8": 1e12}},
        "impossible": {"ms": 1.0, "flops": {"bf16": 5e12}},
    }
    run = run_of(tmp_path, Invented(spread=0.0).times(Case.of("linear", {"M": 16}), arms))
    found = records.arm_records(run, "linear")
    share = {r["arm"]: r["peak_share"] * r["value"] / arms[r["arm"]]["ms"] for r in found}
    by_hand = {"bf16": 0.5, "mixed": (1 / 989 + 2 / 1979) * 1e3 / 4, "copy": 0.5}
    assert {arm: share[arm] for arm in by_hand} == pytest.approx(by_hand)
    made = tables.suite_table(run, "linear")
    column = [c.title for c in made.columns].index("of peak")
    cells = {r["arm"]: row[column] for r, row in zip(found, made.rows, strict=True)}
    assert (cells["unknown"].text, cells["bf16"].style) == ("N/A", "")
    assert (cells["impossible"].style, cells["impossible"].note) == (
        "bad",
        "above the peak at the measured clock",
    )


def strings(*folders):
    """The string constants of the code in some folders."""
    found = set()
    for folder in folders:
        for path in folder.rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            found |= {
                node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
    return found


def test_a_misspelt_word_column_or_field_is_seen():
    """What no code names would show nothing, and nobody would miss it. Oracle: the strings of the code itself."""
    code = Path(harness.__file__).parent
    known = strings(code) | set(columns_of.COMPUTED) | set(METRICS)
    fields = {
        (table, field)
        for table, said in columns_of.column_entries().items()
        if table
        not in ("findings", "headline")  # attributes of an object, and cells made by title: both raise
        for each in said
        for about in [{"title": each} if isinstance(each, str) else each]
        for field in (about.get("field", about["title"]), about.get("needs", True))
    }
    assert [named for named in fields if named[1] is not True and named[1] not in known] == []
    assert set(columns_of.column_entries()) <= known
    assert facts.names().keys() <= strings(code / "machine")
    parts = {word for plan in section.plans().values() for word in plan}
    assert parts <= {*section.PARTS, "title", "intro", "reads", "timed", "folded", "in_markdown"}
    with pytest.raises(TypeError, match="hnit"):
        columns_of.column(title="cases", hnit="how many")


def test_runs_of_one_machine_are_read_together(tmp_path):
    """Casts are read against the ceilings of another run."""
    cases = {"ceilings": ceiling_cases(Invented(), 4200.0, 740.0), "cast": cast_cases(Invented(), 4200.0)}
    runs = [
        write_run(tmp_path, own, sweep=name, run_id=f"2026010{i}T000000Z-0123456-aaaa")
        for i, (name, own) in enumerate(cases.items())
    ]
    assert "of copy" in [c.title for c in tables.suite_table(machine(*runs), "cast").columns]


@pytest.mark.filterwarnings("ignore:skipped an unreadable file")
@pytest.mark.parametrize(
    ("state", "note"),
    [
        ("interrupted", "was interrupted"),
        ("failed", "ended early"),
        ("running", "has not ended"),
        ("", "has no readable _run.json"),
        ("finished", "part-corrupt.parquet"),
    ],
)
def test_a_run_that_is_not_whole_says_so_first(tmp_path, state, note):
    run = tiny_run(tmp_path, state=state or "finished")
    if not state:
        (run / "_run.json").unlink()
    if state == "finished":
        (run / "part-corrupt.parquet").write_bytes(b"PAR1 not really")
    written = write_report([run], tmp_path / "r.html")
    page = Page(written.html.read_text()).text
    assert page.index(note) < page.index("FP8 is faster here")
    assert note in written.markdown.read_text().replace("\\_", "_")  # escaped, as all that a run says
    assert len(written.problems) == (state == "finished")
