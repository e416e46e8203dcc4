"""The file of a report: no request, no script where none is wanted, the same bytes, colours."""

from __future__ import annotations

import os
import subprocess
import sys

from report_cases import tiny_run

from harness.__main__ import main as command_line
from harness.report import write_report

# The file


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
