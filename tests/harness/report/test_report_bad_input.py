"""Bad input of the report: what is missing, old, unknown or hostile ends in a page that says so, never in a wrong one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from curves_for_tests import whole_suite
from markdown_it import MarkdownIt
from report_cases import gemm_cases, linear_cases, train_cases
from report_fixtures import CPU, H200, Invented, absent, figure, write_run
from test_report_markup import HOSTILE

from harness import store
from harness.report import write_report
from harness.report.runs import load
from harness.report.steps import mfu_table
from harness.store.case import Case
from harness.store.cause import Cause
from harness.store.measurement import Measurement


def page_of(tmp_path: Path, run: Path) -> str:
    return write_report([run], tmp_path / "r.html").html.read_text()


@pytest.mark.parametrize("env", [H200, CPU], ids=["GPU", "CPU"])
def test_a_run_in_which_nothing_succeeded(tmp_path: Path, env: dict[str, object]) -> None:
    """Every reason is on the page; no answer is yes, no headline, no figure, no claim."""
    case = Case.of("linear", {"M": 16, "K": 32, "N": 48})
    rows = [
        absent(case, "bf16_eager", "failed", "out of memory: tried to allocate 2.00 GiB"),
        absent(case, "tensorwise_eager", "skipped", "compute capability 8.0 has no FP8", "bf16_eager"),
        absent(
            case,
            "tensorwise_eager",
            "failed",
            "SQNR is 3 dB, 28 expected",
            "bf16_eager",
            "sqnr_db",
            Cause.NUMERICS,
        ),
    ]
    source = page_of(tmp_path, write_run(tmp_path, [rows], env=env))
    for row in rows:
        assert row.reason in source
    assert not re.search(r'<div class="answer yes"', source)
    assert 'id="t-headline' not in source
    assert "<svg" not in source
    assert 'id="claims"' not in source


def test_a_gpu_with_unknown_peak_reads_not_available(tmp_path: Path) -> None:
    """No share of a peak, no nominal roof, no MFU, and no fallback to another device; rates and ratios stand."""
    env = H200 | {"gpu": "NVIDIA H200 Imitation"}
    cases = [*gemm_cases(Invented(), 720.0)[:3], *train_cases(Invented())]
    run = write_run(tmp_path, cases, env=env)
    source = page_of(tmp_path, run)
    assert "This GPU is not in the table of peaks: N/A, no fallback." in source
    assert "Published peak: N/A, this device is not in the table of peaks." in source
    assert "bf16, published peak" not in source
    (found,) = load([run], tmp_path).machines
    made = mfu_table(found)
    shares = [
        i
        for i, c in enumerate(made.columns)
        if c.title in ("mixed MFU", "MFU of bf16 peak", "MFU of FP8 peak", "HFU")
    ]
    assert len(shares) == 4
    assert {row[i].text for row in made.rows for i in shares} == {"N/A"}
    assert re.search(r"1\.\d+x", source)


HARMLESS = [f"name{i}" for i in range(len(HOSTILE))]


def _run_with(names: list[str], folder: Path) -> Path:
    """A run in which each text that a user or a machine can choose is one of the names."""
    pick = [names[i % len(names)] for i in range(64)]
    env = H200 | {
        "gpu": pick[0],
        "driver": pick[1],
        "torch": pick[2],
        "git_commit": pick[3],
        pick[4]: pick[5],
    }
    invented = Invented()
    cases: list[list[Measurement]] = []
    for i in range(len(names)):
        axes = {
            "shape_set": pick[i],
            "layer": pick[i + 1],
            "role": pick[i + 2],
            "M": 16 * (i + 1),
            "K": 32,
            "N": 48,
        }
        case = Case.of("gemm", axes)
        flops = {"bf16": 1e9}
        arms: dict[str, dict[str, object]] = {
            "bf16": {"ms": 1.0, "flops": flops, "bytes": 1e6},
            pick[i + 3]: {"ms": 0.6, "flops": {"e4m3": 1e9}, "bytes": 1e6, "baseline": "bf16",
                          "resolved": {"backend": pick[i + 4], "kernels": [pick[i + 5]], "recipe": pick[i + 3]}},
        }  # fmt: skip
        rows = invented.times(case, arms)
        rows.append(figure(case, pick[i + 3], "sqnr_db", 28.0, resolved={"sqnr_bound_db": 27.0}))
        rows.append(absent(case, pick[i + 6], "failed", pick[i + 7], "bf16"))
        cases.append(rows)
    cases.append([replace(r, suite="../odd suite") for r in cases[0] if r.status == "ok"])
    cases += linear_cases(invented, 690.0)[:2]
    cases.append([replace(r, axes=r.axes.replace("nano", "n")) for r in whole_suite()])
    run = write_run(folder, cases, env=env, env_id="e" * 10)
    about = json.loads((run / "_run.json").read_text())
    about |= {"command": pick[8], "question": pick[9], "sweep": pick[10]}
    (run / "_run.json").write_text(json.dumps(about))
    (run / "part-broken.parquet").write_bytes(b"junk")
    return run


class Tags(HTMLParser):
    """Elements with the attributes that could act, and their number."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[str, ...]]] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, tuple(name for name, _ in attrs)))


@pytest.mark.filterwarnings("ignore:skipped an unreadable file")
def test_hostile_names_change_no_element_of_either_page(tmp_path: Path) -> None:
    """Oracle: the same run with harmless names. Two runs of the same shape make pages of the same elements."""
    pages = {}
    for kind, names in (("hostile", list(HOSTILE)), ("harmless", HARMLESS)):
        run = _run_with(names, tmp_path / kind)
        assert len(store.read(run)) > 100
        pages[kind] = write_report([run], tmp_path / f"{kind}.html", figures=True)
    html = {kind: Tags(_without_figures(page.html.read_text())).seen for kind, page in pages.items()}
    assert [t for t, _ in html["hostile"]] == [t for t, _ in html["harmless"]]
    acting = {a for _, attributes in html["hostile"] for a in attributes if a.startswith("on")}
    assert acting == set()
    reader = MarkdownIt("commonmark").enable("table")
    marked = {kind: Tags(reader.render(page.markdown.read_text())).seen for kind, page in pages.items()}
    assert [t for t, _ in marked["hostile"]] == [t for t, _ in marked["harmless"]]
    written = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.svg")]
    assert written
    assert all(re.fullmatch(r"(hostile|harmless)_figures/[\w-]+\.svg", name) for name in written)
    ids = re.findall(r' id="([^"]*)"', _without_figures(pages["hostile"].html.read_text()))
    assert all(re.fullmatch(r"[\w-]+", found) for found in ids)
    shown = pages["hostile"].html.read_text()
    assert "\u202e" not in shown + pages["hostile"].markdown.read_text()
    assert "<script>alert" not in shown
    drawn = re.findall(r"<svg.*?</svg>", shown, re.DOTALL)
    assert drawn
    assert {t for d in drawn for t, _ in Tags(d).seen} <= {
        "svg",
        "title",
        "g",
        "path",
        "defs",
        "use",
        "text",
        "clippath",
        "rect",
        "pattern",
        "style",
    }


def _without_figures(source: str) -> str:
    """Figures depend on the order and the width of labels; they are looked at apart."""
    return re.sub(r"<figure.*?</figure>", "", source, flags=re.DOTALL)
