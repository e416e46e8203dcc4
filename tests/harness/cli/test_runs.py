"""`python -m harness runs`. Oracle: the runs that were made, in the order in which they began."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from toy import offered

from harness.__main__ import main

BOLD = "\x1b[1m<b>sweep</b>"


@pytest.fixture(autouse=True)
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered([1], tmp_path, monkeypatch)
    quick = ["sweep=toy", "device=cpu", "rounds=4", "isolate=false"]
    assert main([*quick, "run_id=b"]) == 0
    assert main([*quick, "run_id=a", "report=false"]) == 0
    for shard in ("0/2", "1/2"):  # started apart: the run itself has no _run.json
        assert main([*quick, "run_id=c", f"shard={shard}"]) == 0


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["runs", *words]) == 0
    return capsys.readouterr().out


def test_runs_are_listed_newest_first_each_once_with_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys)
    assert re.findall(r"^(\w+)  finished  20[-0-9: ]{14}  mine  toy, CPU: ", out, re.MULTILINE) == [
        "c",
        "a",
        "b",
    ]
    assert re.findall(r"reports/\w+\.html", out) == ["reports/b.html", "reports/index.html"]
    page = Path("reports/index.html").read_text()
    assert re.findall(r'href="(\w+\.html)"', page) == ["b.html"]
    assert re.findall(r">([abc])</td>", page) == ["c", "a", "b"]
    assert "2 older" in told(capsys, "last=1")


def test_published_runs_and_those_of_a_gate_are_told_from_mine(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the file beside published runs, and what the record of a run says made it; no name of a folder."""
    Path("results/theirs").mkdir()
    Path("results/toy/a").rename("results/theirs/a")
    Path("results/theirs/provenance.yaml").write_text("")
    about = Path("results/toy/b/_run.json")
    record = json.loads(about.read_text())
    about.write_text(json.dumps(record | {"made_by": "gate"}))
    Path("results/toy/c/_run.json").write_text(json.dumps(record | {"made_by": "launch", "run_id": "c"}))
    found = json.loads(told(capsys, "json=true"))
    assert [(run["run_id"], run["whose"]) for run in found["runs"]] == [
        ("c", "mine"),
        ("a", "published"),
        ("b", "gate"),
    ]
    assert found["older"] == 0


def test_one_that_died_one_without_rows_and_a_strangers_words(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Path("results/toy/a/_progress.json")
    progress.write_text(json.dumps(json.loads(progress.read_text()) | {"state": "running", "began": -1}))
    for file in Path("results/toy/b").glob("*.parquet"):
        file.unlink()
    about = Path("results/toy/b/_run.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"sweep": BOLD}))
    out = told(capsys)
    assert re.search(r"^a  gone", out, re.MULTILINE)
    assert re.search(r"no rows", out)
    assert "\x1b" not in out
    assert "<b>" not in Path("reports/index.html").read_text()


def test_no_run_and_no_place_for_the_index_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "results_dir=nowhere"]) == 2
    Path("file").write_text("")
    assert main(["runs", f"reports_dir={os.fspath(Path('file').absolute())}"]) == 2
    assert "reports_dir=DIR" in capsys.readouterr().err.splitlines()[-1]
