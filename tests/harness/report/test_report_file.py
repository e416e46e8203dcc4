"""The file of a report: no request, no script where none is wanted, the same bytes, colours."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from report_cases import tiny_run
from report_pages import Page

from harness import store
from harness.__main__ import main as command_line
from harness.report import write_report

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
    bundled = gpu[1].html.read_text()  # with its licences
    for notice in ("jQuery JavaScript Library", "SpryMedia Ltd", "Permission is hereby granted"):
        assert notice in bundled
    rows = re.search(r'<table id="t-rows-.*?</table>', source, re.DOTALL)
    assert rows is not None
    assert rows[0].count("<tr>") == len(store.read(gpu[0])) + 1


RENDER = """
import sys
from pathlib import Path
import harness.report
harness.report.write_report([Path(sys.argv[1])], Path(sys.argv[2]))
assert not {"torch", "triton", "fp8core"} & set(sys.modules)
"""


def test_same_bytes_from_the_same_data_and_no_torch(tmp_path):
    """A process with another hash seed, time zone, locale and drawing settings."""
    run = tiny_run(tmp_path / "run")
    written = write_report([run], tmp_path / "r.html")
    target = tmp_path / "again.html"
    (tmp_path / "matplotlibrc").write_text("font.size: 20\naxes.formatter.use_locale: True\n")
    other = {"PYTHONHASHSEED": "1", "TZ": "Pacific/Kiritimati", "LC_ALL": "C", "PYTHONUTF8": "0"}
    env = os.environ | other | {"MPLCONFIGDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "error", "-c", RENDER, run, target], check=True, env=env)
    for mine, again in ((written.html, target), (written.markdown, target.with_suffix(".md"))):
        assert again.read_bytes() == mine.read_bytes()


def test_command_line_finds_a_run_by_its_id(tmp_path, capsys, monkeypatch):
    run = tiny_run(tmp_path / "results")
    (run / "part-corrupt.parquet").write_bytes(b"junk")
    monkeypatch.chdir(tmp_path)
    assert command_line(["report", run.name]) == 0
    out, error = capsys.readouterr()
    assert out.splitlines() == [f"report   reports/{run.name}.html", f"markdown reports/{run.name}.md"]
    assert "part-corrupt.parquet" in error
    assert (tmp_path / "reports" / f"{run.name}.html").exists()
