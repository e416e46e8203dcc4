"""Bad input of the report: what is missing, old or unknown ends in a page or a line that says so, never in a wrong page."""

from __future__ import annotations

import re

import pytest
from report_cases import gemm_cases, tiny_run, train_cases
from report_fixtures import CPU, H200, Invented, absent, write_run
from report_pages import machine, table

from harness.__main__ import main as command_line
from harness.report import write_report
from harness.report.steps import mfu_table
from harness.store.case import Case
from harness.store.errors import Cause


@pytest.mark.parametrize("env", [H200, CPU], ids=["GPU", "CPU"])
def test_a_run_in_which_nothing_succeeded(tmp_path, env):
    """Every reason is on the page; no answer is yes, no headline, no figure, no claim."""
    case, fp8 = Case.of("linear", {"M": 16, "K": 32, "N": 48}), "tensorwise_eager"
    rows = [
        absent(case, "bf16_eager", "failed", "out of memory: tried to allocate 2.00 GiB"),
        absent(case, fp8, "skipped", "compute capability 8.0 has no FP8", "bf16_eager"),
        absent(case, fp8, "failed", "SQNR is 3 dB, 28 expected", "bf16_eager", "sqnr_db", Cause.NUMERICS),
    ]
    source = write_report([write_run(tmp_path, [rows], env=env)], tmp_path / "r.html").html.read_text()
    assert all(row.reason in source for row in rows)
    for absent_one in ("FP8 is faster here", 'id="t-headline', "<svg"):
        assert absent_one not in source


def test_a_gpu_with_unknown_peak_reads_not_available(tmp_path):
    """No share of a peak, no MFU, and no fallback to another device; rates and ratios stand."""
    env = H200 | {"gpu": "NVIDIA H200 Imitation"}
    run = write_run(tmp_path, [*gemm_cases(Invented(), 720.0)[:3], *train_cases(Invented())], env=env)
    source = write_report([run], tmp_path / "r.html").html.read_text()
    assert "This GPU is not in the table of peaks: N/A, no fallback." in source
    assert re.search(r"1\.\d+x", source)
    rows = table(mfu_table(machine(run)))
    titles = ("mixed MFU", "MFU of bf16 peak", "MFU of FP8 peak", "HFU")
    assert {row[title] for row in rows for title in titles} == {"N/A"}


def written(path, content=None):
    """A file, or an empty folder."""
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if content is None else path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("make", "output", "says"),
    [
        (lambda p: p / "nowhere", "out/r.html", "no run"),
        (lambda p: written(p / "empty"), "out/r.html", "holds no *.parquet file"),
        (lambda p: written(p / "notes.txt", b"hello"), "out/r.html", "expected a folder or a *.parquet file"),
        (lambda p: written(p / "bad" / "part-1.parquet", b"junk").parent, "out/r.html", "no rows in"),
        (lambda p: tiny_run(p / "run"), "out/r.txt", "must be named *.html"),
        # A file stands where the folder should be: refused for root too, unlike a permission.
        (
            lambda p: tiny_run(written(p / "out", b"").parent / "run"),
            "out/r.html",
            "choose another place with -o FILE.html",
        ),
    ],
)
def test_bad_words_end_in_one_line_and_exit_2(tmp_path, capsys, make, output, says):
    assert command_line(["report", str(make(tmp_path)), "-o", str(tmp_path / output)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").is_dir()
