"""Markup of the report: nothing that a row holds may become markup, a cell or a direction of its own.

Oracles: html.parser and markdown-it (CommonMark with GFM tables), which read the pages as a browser and a forge would; and the
same run with harmless names.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hostile import HOSTILE, READER, Tags
from report_cases import linear_cases
from report_fixtures import H200, Invented, absent, figure, write_run

from harness.report import write_report
from harness.store.case import Case


def run_with(names, folder):
    """A run in which each text that a user or a machine can choose is one of the names."""
    pick = [names[i % len(names)] for i in range(64)]
    env = H200 | dict(
        zip(("gpu", "driver", "torch", "git_commit", pick[4]), [*pick[:4], pick[5]], strict=True)
    )
    invented, cases = Invented(), []
    for i in range(len(names)):
        axes = dict(zip(("shape_set", "layer", "role"), pick[i:], strict=False))
        case = Case.of("gemm", {**axes, "M": 16 * (i + 1), "K": 32, "N": 48})
        about = {"backend": pick[i + 4], "kernels": [pick[i + 5]], "recipe": pick[i + 3]}
        bf16 = {"ms": 1.0, "flops": {"bf16": 1e9}, "bytes": 1e6}
        fp8 = bf16 | {"flops": {"e4m3": 1e9}, "baseline": "bf16", "resolved": about}
        rows = invented.times(case, {"bf16": bf16, pick[i + 3]: fp8})
        rows.append(figure(case, pick[i + 3], "sqnr_db", 28.0, resolved={"sqnr_bound_db": 27.0}))
        cases.append([*rows, absent(case, pick[i + 6], "failed", pick[i + 7], "bf16")])
    cases.append([replace(r, suite="../odd suite") for r in cases[0] if r.status == "ok"])
    cases += linear_cases(invented, 690.0)[:2]
    run = write_run(folder, cases, env=env, env_id="e" * 10)
    about = json.loads((run / "_run.json").read_text())
    about |= {
        "command": pick[13],
        "question": pick[9],
        "sweep": pick[10],
        "state": "running",
        "parts_done": pick[13:15],
        "parts_total": 3,
    }
    (run / "_run.json").write_text(json.dumps(about))
    (run / "part-broken.parquet").write_bytes(b"junk")
    return run


@pytest.mark.filterwarnings("ignore:skipped an unreadable file")
def test_hostile_names_change_no_element_of_either_page(tmp_path):
    """Two runs of the same shape make pages of the same elements; figures, whose labels differ in width, are looked at apart."""
    elements, pages = {}, {}
    for kind, names in (("hostile", HOSTILE), ("harmless", [f"name{i}" for i in range(len(HOSTILE))])):
        written = write_report(
            [run_with(list(names), tmp_path / kind)], tmp_path / f"{kind}.html", figures=True
        )
        pages[kind], twin = written.html.read_text(), written.markdown.read_text()
        html = Tags(re.sub(r"<figure.*?</figure>", "", pages[kind], flags=re.DOTALL))
        elements[kind] = html.tags, Tags(READER.render(twin)).tags
        assert not [name for name in html.names if name.startswith("on")]
        assert "\u202e" not in pages[kind] + twin
        assert "<script>alert" not in pages[kind] + twin
    assert elements["hostile"] == elements["harmless"]
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.svg")]
    assert files
    assert all(re.fullmatch(r"(hostile|harmless)_figures/[\w-]+\.svg", name) for name in files)
    outside = re.sub(r"<figure.*?</figure>", "", pages["hostile"], flags=re.DOTALL)
    assert all(re.fullmatch(r"[\w-]+", found) for found in re.findall(r' id="([^"]*)"', outside))
    drawn = re.findall(r"<svg.*?</svg>", pages["hostile"], re.DOTALL)
    allowed = {"svg", "title", "g", "path", "defs", "use", "text", "clippath", "rect", "pattern", "style"}
    assert drawn
    assert {tag for each in drawn for tag in Tags(each).tags} <= allowed
