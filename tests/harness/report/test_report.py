"""Report: what it says, what it refuses, and that its bytes depend on the data alone."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_fixtures import (
    H200,
    Invented,
    absent,
    cast_cases,
    ceiling_cases,
    cpu_run,
    figure,
    gemm_cases,
    gpu_run,
    linear_cases,
    tiny_run,
    write_run,
)

from harness import store
from harness.__main__ import main as command_line
from harness.report import charts, drawing, numerics, records, tables, verdicts, write_report
from harness.report.facts import facts
from harness.report.runs import load
from harness.report.table import quantile
from harness.store import text
from harness.store.case import Case
from harness.store.cause import Cause
from harness.store.errors import UsageError

VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use", "rect"}


class Page(HTMLParser):
    """Links, ids, visible words and nesting of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self._open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    run = gpu_run(folder / "results")
    return run, write_report([run], folder / "reports" / "gpu.html")


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    run = cpu_run(folder / "results")
    return run, write_report([run], folder / "reports" / "cpu.html")


def machine(*paths):
    """The only machine of some runs."""
    (found,) = load(paths, Path()).machines
    return found


def run_of(tmp_path, cases, **more):
    return machine(write_run(tmp_path, cases, **more))


# The three questions


def test_an_emulated_arm_says_so_beside_its_name() -> None:
    for resolved, note in (('{"emulated": "no MX kernel"}', "emulated"), ("{}", ""), ("", "")):
        cell = tables.arm_cell({"arm": "mxfp8_eager", "resolved": resolved})
        assert (cell.text, cell.order, cell.note) == ("mxfp8_eager", "mxfp8_eager", note)


def test_quartiles_of_exact_results_are_infinite_not_nan() -> None:
    """numpy would interpolate between two infinities, which is NaN and a warning."""
    inf = float("inf")
    assert [quantile([inf] * n, q) for n in (1, 3) for q in (0.0, 0.25, 0.75)] == [inf] * 6
    assert quantile([], 0.25) is None
    assert quantile([1.0, 2.0, 3.0], 0.25) == 1.5


def test_a_gpu_run_answers_all_three_questions(gpu):
    faster, sound, ran = verdicts.answers(machine(gpu[0]))
    assert [faster.verdict, sound.verdict, ran.verdict] == ["yes", "yes", "yes"]
    assert faster.sentence.startswith(
        "Whole layers (forward and backward, casts included), compile against compile, speed over bf16: "
    )
    assert "speed over bf16: tensorwise_compile 1." in faster.sentence
    assert any("K=4104 is no multiple of 16" in line for line in ran.evidence)
    assert "80 of 80" in ran.sentence


def test_eager_layers_decide_where_nothing_was_compiled(tmp_path):
    cases = linear_cases(Invented(), 690.0, dict.fromkeys(_arms("compile"), "no compiler"))
    answer = verdicts.is_faster(run_of(tmp_path, cases))
    assert "eager against eager" in answer.sentence
    assert answer.verdict == "partly"


def test_steps_that_are_replayed_are_told_apart_and_decide_last():
    """By hand: what compiles decides, then what is eager, then a CUDA graph of it."""
    baselines = ["bf16_graph", "bf16_fused_eager", "bf16_compile", "bf16_eager"]
    pairs = pd.DataFrame({"suite": "train", "baseline": baselines, "regime": "isolated", "speedup": 1.1})
    parts = [(how, list(group["baseline"])) for _, how, group in verdicts._by_part(pairs)]
    assert parts == [
        ("compile against compile", ["bf16_compile"]),
        ("eager against eager", ["bf16_fused_eager", "bf16_eager"]),
        ("graph against graph", ["bf16_graph"]),
    ]


def _arms(mode):
    return [f"{p}_{mode}" for p in ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp")]


@pytest.mark.parametrize(("fp8_ms", "verdict"), [(0.5, "yes"), (2.0, "no"), (1.0, "can't tell")])
def test_verdict_of_speed(tmp_path, fp8_ms, verdict):
    """Arms of half and double the time; equal arms are noise or ties, which is no gain (with 40 % noise: can't tell)."""
    invented = Invented(spread=0.4 if verdict == "can't tell" else 0.004)
    cases = []
    for m in range(16, 64, 16):
        case = Case.of("gemm", {"M": m})
        arms = {
            "bf16": {"ms": 1.0, "flops": {"bf16": 1.0}},
            "fp8": {"ms": fp8_ms, "flops": {"e4m3": 1.0}, "baseline": "bf16"},
        }
        arms["bf16:again"] = {**arms["bf16"], "baseline": "bf16"}
        cases.append(invented.times(case, arms))
    assert verdicts.is_faster(run_of(tmp_path, cases)).verdict == verdict


def test_a_device_without_fp8_cannot_tell_and_says_why(tmp_path):
    found = run_of(tmp_path, gemm_cases(Invented(), 250.0, fp8=False))
    for answer in verdicts.answers(found):
        assert answer.verdict == "can't tell"
        assert any("compute capability 8.0 has no FP8" in line for line in answer.evidence)


def test_a_cpu_never_claims_speed(cpu):
    """The notice stands before the first answer; every section of times is folded and labelled."""
    page = Page(cpu[1].html.read_text()).text
    assert verdicts.is_faster(machine(cpu[0])).verdict == "can't tell"
    assert page.index(verdicts.CPU_NOTICE) < page.index("Is FP8 faster here?")
    assert "the speed of bf16" not in page
    source = cpu[1].html.read_text()
    titles = re.findall(
        r"<section id=\"[^\"]*\"( class=\"folded\")?>\s*(?:<details><summary>)?<h3>([^<]*)", source
    )
    timed = [
        (fold, title)
        for fold, title in titles
        if re.search("FP8 against|Eager and|Layers|GEMM|Casts|Ceil|Compile", title)
    ]
    assert len(timed) >= 3
    assert all(fold and title.startswith("CPU times: ") for fold, title in timed)
    assert cpu[1].markdown.read_text().index(verdicts.CPU_NOTICE) < cpu[1].markdown.read_text().index(
        "**Is FP8"
    )


def test_wrong_numerics_are_named(tmp_path):
    case = Case.of("gemm", {"M": 16, "layer": "qkv"})
    rows = Invented().times(case, {"bf16": {"ms": 1.0}})
    rows += [
        absent(
            case,
            "rowwise_eager",
            "failed",
            "20.1; SQNR is 20.10 dB, 28.50 expected",
            "bf16",
            "sqnr_db",
            Cause.NUMERICS,
        ),
        absent(
            case,
            "rowwise_eager",
            "failed",
            "numerics: SQNR is 20.10 dB, 28.50 expected",
            "bf16",
            cause=Cause.NUMERICS,
        ),
    ]
    answer = verdicts.is_sound(run_of(tmp_path, [rows]))
    assert answer.verdict == "no"
    assert answer.evidence[0].startswith("gemm rowwise_eager: qkv 16: ")
    assert "20.10 dB" in answer.evidence[0]
    assert answer.sentence.startswith("1 result")


def test_a_figure_below_its_stored_bound_is_a_no(tmp_path):
    case = Case.of("gemm", {"M": 16})
    arms = {"fp8": {"ms": 1.0, "flops": {"e4m3": 1.0}}}
    low = figure(case, "fp8", "sqnr_db", 28.0, resolved={"sqnr_bound_db": {"sqnr_db": 28.3}})
    answer = verdicts.is_sound(run_of(tmp_path, [[*Invented().times(case, arms), low]]))
    assert (answer.verdict, answer.evidence[0]) == ("no", "gemm fp8: SQNR of output below its bound")


def test_codes_that_differ_are_a_no(tmp_path):
    case = Case.of("cast", {"M": 16})
    answer = verdicts.is_sound(run_of(tmp_path, [[figure(case, "eager", "mismatches", 3.0)]]))
    assert (answer.verdict, answer.evidence[0]) == ("no", "cast eager: 3 codes differ")


@pytest.mark.parametrize(
    ("resolved", "verdict"),
    [
        ({"fp8_gemms": 3, "fp8_gemms_expected": 3}, "yes"),
        ({"fp8_gemms": 2, "fp8_gemms_expected": 3}, "no"),
        ({"a_dtype": "float8_e4m3fn"}, "yes"),
        ({}, "can't tell"),
    ],
)
def test_proof_that_fp8_ran(tmp_path, resolved, verdict):
    case = Case.of("linear", {"M": 16})
    arms = {"tensorwise_eager": {"ms": 1.0, "flops": {"e4m3": 1.0}, "resolved": resolved}}
    answer = verdicts.did_fp8_run(run_of(tmp_path, [Invented().times(case, arms)]))
    assert answer.verdict == verdict
    if verdict == "no":
        assert "2 of 3 GEMMs in FP8" in answer.evidence[0]


def test_an_arm_that_fell_back_is_a_no(tmp_path):
    case = Case.of("linear", {"M": 16})
    good = {"tensorwise_eager": {"ms": 1.0, "flops": {"e4m3": 1.0}, "resolved": {"fp8_gemms": 3}}}
    rows = Invented().times(case, good)
    rows.append(
        absent(
            case,
            "rowwise_eager",
            "failed",
            "numerics: 0 FP8 GEMMs ran where 3 were due: FP8 did not run as asked",
            cause=Cause.NOT_FP8,
        )
    )
    answer = verdicts.did_fp8_run(run_of(tmp_path, [rows]))
    assert answer.verdict == "no"
    assert "0 FP8 GEMMs ran where 3 were due" in answer.evidence[0]


# What stands on the page


def test_nothing_failed_or_skipped_is_hidden(gpu):
    """Oracle: the store; a reason stands once, with every arm that it holds for."""
    page = Page(gpu[1].html.read_text()).text
    rows = store.read(gpu[0])
    bad = rows[rows["status"] != "ok"]
    found = tables.troubles(machine(gpu[0])).rows
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
    table = tables.every_row(machine(gpu[0]))
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
    run = run_of(tmp_path, [Invented(spread=0.0).times(case, arms)])
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


def test_an_unknown_device_has_no_peak(tmp_path):
    """N/A, never a fallback: a name that only contains a known one is another device."""
    run = run_of(tmp_path, gemm_cases(Invented(), 720.0)[:1], env=H200 | {"gpu": "NVIDIA H200 Imitation"})
    table = tables.suite_table(run, "gemm")
    column = [c.title for c in table.columns].index("of peak")
    assert {row[column].text for row in table.rows} == {"N/A"}
    assert dict(facts(run))["published peak"].startswith("N/A")


def test_without_ceilings_there_is_no_share(tmp_path):
    found = run_of(tmp_path, cast_cases(Invented(), 4200.0))
    assert "of copy" not in [c.title for c in tables.suite_table(found, "cast").columns]
    assert "was not measured in these runs" in charts.casts(found)[0].caption


def test_a_suite_that_nobody_knew_gets_a_table(tmp_path):
    case = Case.of("broadcast", {"world": 8, "bytes": 1024, "dtype": "e4m3fn"})
    run = write_run(tmp_path, [Invented().times(case, {"nccl": {"ms": 0.25, "bytes": 1e6}})])
    page = Page(write_report([run], tmp_path / "r.html").html.read_text()).text
    assert "Broadcast" in page
    assert "0.25" in page


def test_squares_show_every_cell(gpu, cpu):
    for folder in (gpu[0], cpu[0]):
        for grid in tables.squares(machine(folder)):
            assert [len(row) for row in grid.table.rows] == [3] * 4
            assert all(cell.text for row in grid.table.rows for cell in row)
    without_compiler = tables.squares(machine(cpu[0]))
    notes = [cell.note for grid in without_compiler for row in grid.table.rows for cell in row]
    assert notes.count("no C++ compiler: torch.compile needs one") == 4 * len(without_compiler)


def test_two_machines_stand_apart(tmp_path):
    """The GPU first; each with its own answers and environment; no ratio crosses them."""
    runs = [cpu_run(tmp_path / "c"), gpu_run(tmp_path / "g")]
    written = write_report(runs, tmp_path / "both.html")
    page = Page(written.html.read_text())
    assert page.text.count("Is FP8 faster here?") == 4  # on each first screen, and where its grounds are
    assert page.text.index("NVIDIA H200") < page.text.index("AMD EPYC")
    assert len(page.ids) == len(set(page.ids))
    assert sum(len(m.frame) for m in load(runs, tmp_path).machines) >= 500
    assert written.html.stat().st_size < 2e6


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


def test_reasons_cannot_inject_markup(tmp_path):
    case = Case.of("gemm", {"layer": "<img src=x>|", "M": 16})
    rows = [absent(case, "fp8", "failed", "<script>alert(1)</script> a|b\nc", "bf16")]
    rows += Invented().times(case, {"bf16": {"ms": 1.0}})
    written = write_report([write_run(tmp_path, [rows])], tmp_path / "r.html")
    source = written.html.read_text()
    assert "<script>alert(1)</script>" not in source
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in source
    assert "<img src=x>" not in source
    assert "a\\|b c" in written.markdown.read_text()


# The file


def test_page_is_well_formed_and_asks_for_nothing(gpu):
    """Page() checks the nesting; no link leaves the folder; the policy forbids what the page does not hold."""
    source = gpu[1].html.read_text()
    page = Page(source)
    assert len(page.ids) == len(set(page.ids))
    assert all(re.match(r"#|(\.\./)*[\w./-]+\.parquet$", link) for link in page.links), page.links
    assert not {"img", "iframe", "link", "object", "embed", "form"} & set(page.tags)
    assert not re.search(r"url\((?!#)", re.sub(r"<script.*?</script>", "", source, flags=re.DOTALL))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', source)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';")
    assert "unsafe-eval" not in policy[1]
    assert "http" not in policy[1]


def test_static_page_has_no_script(gpu, tmp_path):
    written = write_report([gpu[0]], tmp_path / "static.html", static=True)
    source = written.html.read_text()
    assert "<script" not in source
    assert "script-src" not in source
    assert source.count("<table") == gpu[1].html.read_text().count("<table")
    assert re.search(r"jQuery|data-rest|text/plain", source) is None
    rows = re.search(r'<table id="t-rows-.*?</table>', source, re.DOTALL)
    assert rows is not None
    assert rows[0].count("<tr>") == len(store.read(gpu[0])) + 1


def test_licences_of_the_embedded_script_are_listed(gpu, tmp_path):
    """Oracle: the notices in the bundle that itables installs."""
    page = Page(gpu[1].html.read_text()).text
    for notice in (
        "jQuery JavaScript Library",
        "JSZip",
        "SpryMedia Ltd",
        "Marc Wouts",
        "Lucide",
        "Permission is hereby granted",
    ):
        assert notice in page
    static = write_report([gpu[0]], tmp_path / "static.html", static=True)
    assert "jQuery" not in static.html.read_text()


RENDER = """
import sys
from pathlib import Path
import harness.report
assert not {"torch", "triton", "fp8core"} & set(sys.modules), "import"
harness.report.write_report([Path(sys.argv[1])], Path(sys.argv[2]))
assert not {"torch", "triton", "fp8core"} & set(sys.modules), "render"
"""


def test_same_bytes_from_the_same_data_and_no_torch(gpu, tmp_path):
    """Processes with other hash seeds, time zones, locales and drawing settings write the same files; none has torch."""
    expected = gpu[1].html.read_bytes(), gpu[1].markdown.read_bytes()
    target = gpu[1].html.with_name("again.html")
    (tmp_path / "matplotlibrc").write_text(
        "font.size: 20\naxes.formatter.use_locale: True\nsvg.fonttype: path\n"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "MPLCONFIGDIR": str(tmp_path)}
    for settings in (
        {"PYTHONHASHSEED": "1", "TZ": "Pacific/Kiritimati", **ascii_only},
        {"PYTHONHASHSEED": "2", "TZ": "America/Adak", "LC_ALL": "de_DE.UTF-8", "LANG": "tr_TR.UTF-8"},
    ):
        subprocess.run(
            [sys.executable, "-W", "error", "-c", RENDER, str(gpu[0]), str(target)],
            check=True,
            env={**os.environ, **settings},
        )
        assert target.read_bytes() == expected[0]
        assert target.with_suffix(".md").read_bytes() == expected[1]


def test_markdown_tables_are_rectangular(gpu, cpu):
    for _, written in (gpu, cpu):
        blocks = re.findall(r"(?:^\|.*\n)+", written.markdown.read_text(), re.MULTILINE)
        assert len(blocks) > 4
        for block in blocks:
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(widths) == 1, block


def test_numbers_in_charts_use_page_colours(gpu):
    """No colour of a figure is fixed, so that it shows in both schemes; each variable is defined in all three."""
    source = gpu[1].html.read_text()
    drawn = "".join(re.findall(r"<svg.*?</svg>", source, re.DOTALL))
    assert not re.search(r"#(?!000000)[0-9a-f]{6}\b", re.sub(r'(id|href)="[^"]*"|url\([^)]*\)', "", drawn))
    used = set(re.findall(r"var\((--[\w-]+)\)", drawn))
    assert {"--ink", "--muted", "--series-0", "--band"} <= used
    for scheme in _schemes():
        assert used <= scheme.keys()


def _schemes():
    css = (Path(charts.__file__).parent / "page.css").read_text()
    light, dark, paper = (
        dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    )
    return light, light | dark, light | paper


def _contrast(one, other):
    """WCAG 2.1 contrast ratio of two colours."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return np.dot(
            [0.2126, 0.7152, 0.0722],
            [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts],
        )

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_enough_in_every_scheme():
    """WCAG 2.1: 4.5 to 1 for text, 3 to 1 for the marks of a figure."""
    text_colours = ("--ink", "--muted", "--link", "--yes", "--no", "--partly", "--unknown")
    for scheme in _schemes():
        for name, colour in scheme.items():
            least = 4.5 if name in text_colours else 3.0 if name.startswith("--series") else 0.0
            assert _contrast(colour, scheme["--paper"]) >= least, (name, colour)


# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency", table 1,
# severity 1.0: linear RGB of a normal eye -> what a protanope, deuteranope and tritanope see.
BLIND = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


def _seen(colour, eye):
    """CIE L*a*b* (D65) of a colour as an eye sees it."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(BLIND.get(eye, np.eye(3))) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    x, y, z = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", ["normal", *BLIND])
def test_the_heat_map_can_be_read_by_every_eye(eye):
    """Neighbours differ (CIE76 above 3, a visible step), faster and slower differ clearly, and text stays readable."""
    for scheme in _schemes():
        heat = [_seen(scheme[f"--heat-{i}"], eye) for i in range(9)]
        steps = [np.linalg.norm(a - b) for a, b in itertools.pairwise(heat)]
        assert min(steps) > 3
        for i in range(1, 5):
            assert np.linalg.norm(heat[4 - i] - heat[4 + i]) > (5 if i == 1 else 10)
        for i in range(9):
            assert _contrast(scheme["--ink"], scheme[f"--heat-{i}"]) >= 4.5


def test_series_differ_in_marker_as_well_as_colour():
    """The eight markers are eight, and no two of the first sixteen series look alike even in grey."""
    assert len(set(drawing.MARKERS)) == len(drawing.SERIES)
    looks = [drawing.mark(i) for i in range(16)]
    assert len({(look["marker"], look["fillstyle"]) for look in looks}) == 16


# Words and numbers


@given(st.floats(min_value=1e-12, max_value=1e15), st.integers(min_value=1, max_value=6))
def test_numbers_keep_their_digits(value, digits):
    """Property: what is shown lies within half a unit of the last digit that was asked for."""
    shown = float(text.number(value, digits).replace(",", ""))
    assert abs(shown - value) <= 0.5 * 10.0 ** (np.floor(np.log10(value)) + 1 - digits) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "N/A"),
        (float("nan"), "N/A"),
        (float("inf"), "inf"),
        (0, "0"),
        (-1.234, "-1.23"),
        (9.996, "10.0"),
        (1e-7, "1.00e-07"),
    ],
)
def test_special_numbers(value, shown):
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(1, "1 B"), (1536, "1.5 KiB"), (2**20, "1 MiB"), (5 * 2**40, "5120 GiB")]
)
def test_sizes(count, shown):
    assert text.bytes_(count) == shown


# Bad input


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "nowhere", "no run"),
        (lambda p: _made(p / "empty"), "holds no *.parquet file"),
        (lambda p: _file(p / "notes.txt", b"hello"), "expected a folder or a *.parquet file"),
        (lambda p: _file(p / "bad" / "part-1.parquet", b"junk").parent, "no rows in"),
    ],
)
def test_bad_runs_end_in_one_line_and_exit_2(tmp_path, capsys, make, says):
    target = tmp_path / "out" / "r.html"
    assert command_line(["report", str(make(tmp_path)), "-o", str(target)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not target.parent.exists()


def _made(path):
    path.mkdir()
    return path


def _file(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def test_an_output_folder_that_cannot_be_written(gpu, tmp_path, capsys):
    """A file stands where the folder should be: refused for root too, unlike a permission."""
    blocked = _file(tmp_path / "blocked", b"")
    assert command_line(["report", str(gpu[0]), "-o", str(blocked / "r.html")]) == 2
    error = capsys.readouterr().err
    assert "cannot write" in error
    assert "-o FILE.html" in error
    assert error.count("\n") == 1


def test_the_report_is_named_html(gpu, tmp_path):
    with pytest.raises(UsageError, match=r"must be named \*\.html"):
        write_report([gpu[0]], tmp_path / "r.md")


def test_command_line_finds_a_run_by_its_id(tmp_path, capsys, monkeypatch):
    run = tiny_run(tmp_path / "results")
    (run / "part-corrupt.parquet").write_bytes(b"junk")
    monkeypatch.chdir(tmp_path)
    assert command_line(["report", run.name]) == 0
    out, error = capsys.readouterr()
    assert out.splitlines() == [f"report   reports/{run.name}.html", f"markdown reports/{run.name}.md"]
    assert "part-corrupt.parquet" in error
    assert (tmp_path / "reports" / f"{run.name}.html").exists()


def test_each_case_is_held_to_its_own_bound() -> None:
    """Oracle: docs/numerics-gemm.md, section 4; e4m3 x e5m2 has 4 dB less than e4m3 x e4m3, and both are sound."""
    rows = [
        ("sqnr_db", 28.5, '{"sqnr_bound_db":{"sqnr_db":27.8}}'),
        ("sqnr_db", 24.5, '{"sqnr_bound_db":{"sqnr_db":24.0}}'),
        ("rel_err_max", 0.1, "{}"),
    ]
    frame = pd.DataFrame(rows, columns=["metric", "value", "resolved"]).assign(
        run_id="r", case_id=["a", "b", "c"]
    )
    where = {"sqnr_db": ("r", "b")}
    assert numerics._nearest_to_bound(frame) == ({"sqnr_db": 24.5}, {"sqnr_db": 24.0}, where)
    unbounded = frame.assign(resolved="{}")
    assert numerics._nearest_to_bound(unbounded) == ({"sqnr_db": 24.5}, {}, where)


# Labels of cases


NANO = {
    "accumulation": 1,
    "batch": 8,
    "checkpointing": "none",
    "compute": "fp32",
    "data": "stdlib",
    "layers": 0,
    "model": "nano",
    "profile": True,
    "profile_end": 3,
    "profile_start": 2,
    "schedule": "",
    "seq": 64,
}
OWN = '{"_target_":"my.module.build","batch":"my.module.batch","width":512}'


@pytest.mark.parametrize(
    ("changes", "without", "label"),
    [
        ({}, (), "nano fp32 stdlib batch=8 profile=true seq=64"),
        ({"layers": 4, "checkpointing": "full"}, ("seq",), "nano fp32 stdlib batch=8 checkpointing=full layers=4 profile=true"),
        ({"seed": 0}, set(NANO), "seed=0"),
        ({"lr": 1e-3}, set(NANO), "lr=0.001"),
        ({"schedule": ""}, set(NANO) - {"schedule"}, "nano fp32 stdlib batch=8 profile=true seq=64"),
        ({"schedule": "warmup_bf16:10"}, set(NANO) - {"schedule"}, "schedule=warmup_bf16:10"),
        ({"model": OWN}, set(NANO) - {"model"}, "my.module.build width=512"),
        ({"model": "{not json"}, set(NANO) - {"model"}, "{not json"),
    ],
)  # fmt: skip
def test_a_case_is_named_by_what_tells_it_apart(changes, without, label):
    assert text.case_label({**NANO, **changes}, without) == label


def test_what_goes_without_saying_is_what_the_suites_do_when_not_asked():
    """Oracle: the defaults of the suites that train."""
    from harness.suites import divergence, train

    known = {**divergence.AXES, **train.AXES}
    assert set(text.USUAL) <= set(known)
    for suite in (divergence, train):
        for name in set(text.USUAL) & set(suite.AXES):
            axis = suite.AXES[name]
            assert text.USUAL[name] == (axis.choices[0] if axis.choices else axis.default)


def test_recompiles_stand_beside_graphs_where_they_were_counted(tmp_path):
    case = Case.of("linear", {"M": 16})
    counted = {"compile_cache": "cold", "compile_graphs": 2, "compile_graph_breaks": 1, "recompiles": 3}
    for folder, about, titles in (
        ("with", counted, ["graphs", "graph breaks", "recompiles"]),
        ("without", {"compile_graphs": 2}, ["graphs"]),
    ):
        row = figure(case, "bf16_compile", "compile_s", 2.0, resolved=about)
        made = tables.compile_times(machine(write_run(tmp_path / folder, [[row]])))
        assert [c.title for c in made.columns[4:]] == titles
        assert [c.text for c in made.rows[0][4:]] == ["2", "1", "3"][: len(titles)]
