"""Oracle: pytest-benchmark's own statistics and comparison loader, and the way back through `import`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from gate_fixtures import failed_row, time_row, value_row, write
from pytest_benchmark.stats import Stats
from pytest_benchmark.storage.file import FileStorage

from harness import store
from harness.__main__ import main
from harness.cli.export_benchmark import summary

# What github-action-benchmark (`tool: pytest`) and Bencher (`python_pytest`) read of each benchmark.
READ_BY_DASHBOARDS = ("min", "max", "mean", "stddev", "rounds", "median", "ops", "total", "iterations")


def export(run: Path, file: Path) -> int:
    return main(["export", str(run), "-o", str(file)])


def run_of(tmp: Path) -> Path:
    rows = [
        time_row(1, [1.0, 2.0, 4.0, 3.0, 9.0]),
        time_row(1, [2.0] * 5, "bf16"),
        time_row(2, [0.5, 0.7]),
        value_row(1, "sqnr_db", 28.5),
        failed_row(3, "out of memory"),
    ]
    return write(tmp / "run", rows)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 9, 40, 41])
def test_the_summary_is_that_of_pytest_benchmark(n: int) -> None:
    random.seed(n)
    seconds = [random.lognormvariate(0, 0.8) for _ in range(n)]
    theirs = Stats()
    for x in seconds:
        theirs.update(x)
    expected = theirs.as_dict()
    mine = summary(seconds)
    assert mine.keys() == expected.keys()
    assert mine.pop("outliers") == expected.pop("outliers")
    if "pos - 1" not in _source():  # releases before it was mended return the first datum beyond the fence
        mine.pop("hd15iqr"), expected.pop("hd15iqr")
    assert mine == pytest.approx(expected)


def _source() -> str:
    import inspect

    return inspect.getsource(Stats)


def test_its_comparison_reads_the_file(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    assert export(run_of(tmp_path), file) == 0
    (loaded,) = [data for _, data in FileStorage(str(tmp_path), logger=_Silent()).load(str(file))]
    assert len(loaded["benchmarks"]) == 3
    for one in loaded["benchmarks"]:
        assert set(READ_BY_DASHBOARDS) <= one["stats"].keys()
    command = [sys.executable, "-m", "pytest_benchmark", "compare", str(file), "--columns=median,rounds"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "fp8/time_ms/isolated" in done.stdout


class _Silent:
    def warning(self, *said: Any) -> None:
        raise AssertionError(said)


def test_the_file_comes_back_as_the_same_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "b.json"
    assert export(run_of(tmp_path), file) == 0
    assert "left out: 1 rows that are no times, 1 rows not ok" in capsys.readouterr().err
    assert main(["import", str(file), "--results-dir", str(tmp_path / "r")]) == 0
    rows = {json.loads(r.axes)["test"]: r for r in store.read(tmp_path / "r").itertuples()}
    assert set(rows) == {
        "gemm/1x64x64::fp8/time_ms/isolated",
        "gemm/1x64x64::bf16/time_ms/isolated",
        "gemm/2x64x64::fp8/time_ms/isolated",
    }
    assert rows["gemm/1x64x64::fp8/time_ms/isolated"].samples.tolist() == pytest.approx([1, 2, 4, 3, 9])
    assert json.loads(rows["gemm/2x64x64::fp8/time_ms/isolated"].env)["git_commit"].startswith("0123456789")
    # An imported run, exported again, keeps its names and cases, and so can be compared with the first.
    again = tmp_path / "again.json"
    assert export(tmp_path / "r", again) == 0
    first, second = (json.loads(f.read_text())["benchmarks"] for f in (file, again))
    assert [b["fullname"] for b in first] == [b["fullname"] for b in second]
    assert [b["stats"]["data"] for b in second] == [pytest.approx(b["stats"]["data"]) for b in first]


def test_a_table_holds_every_metric_and_every_sample(tmp_path: Path) -> None:
    """Oracle: the rows that were written."""
    run, file = run_of(tmp_path), tmp_path / "t.csv"
    assert export(run, file) == 0
    table = pd.read_csv(file)
    fp8 = table[(table.arm == "fp8") & (table.metric == "time_ms") & (table.M == 1)]
    assert fp8["sample"].tolist() == [1.0, 2.0, 4.0, 3.0, 9.0]
    assert fp8["round"].tolist() == [0, 1, 2, 3, 4]
    assert table[table.metric == "sqnr_db"].value.tolist() == [28.5]
    assert table[table.status == "failed"].reason.tolist() == ["out of memory"]
    assert export(run, tmp_path / "t.parquet") == 0
    assert len(pd.read_parquet(tmp_path / "t.parquet")) == len(store.read(run))
    assert export(run, tmp_path / "none" / "t.csv") == 2


@pytest.mark.parametrize(("to", "says"), [("wand", "nearest: wandb"), ("mlflow", "pip install mlflow")])
def test_a_tracker_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, to: str, says: str
) -> None:
    """What is sent: tests/clients/test_trackers.py."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert main(["export", str(run_of(tmp_path)), f"to={to}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_median_without_its_data_is_not_passed_off_as_data(tmp_path: Path) -> None:
    bare = {"fullname": "t.py::t", "group": None, "stats": {"median": 0.5, "iterations": 4}}
    (tmp_path / "a.json").write_text(json.dumps({"benchmarks": [bare]}))
    assert main(["import", str(tmp_path / "a.json"), "--results-dir", str(tmp_path / "r")]) == 0
    assert export(tmp_path / "r", tmp_path / "b.json") == 0
    (one,) = json.loads((tmp_path / "b.json").read_text())["benchmarks"]
    assert (one["fullname"], one["stats"]["iterations"], one["stats"]["median"]) == ("t.py::t", 4, 0.5)
    assert "data" not in one["stats"]


def test_cases_that_share_a_label_are_told_apart(tmp_path: Path) -> None:
    rows = [time_row(1, [1.0]), time_row(1, [1.0])]
    object.__setattr__(rows[1], "case_id", "another")
    assert export(write(tmp_path / "run", rows), tmp_path / "b.json") == 0
    names = [b["fullname"] for b in json.loads((tmp_path / "b.json").read_text())["benchmarks"]]
    assert len(set(names)) == 2


def test_what_cannot_be_exported_is_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_time = write(tmp_path / "n", [value_row(1, "sqnr_db", 1.0)])
    stages = write(tmp_path / "s", [time_row(1, [1.0])])
    write(stages, [time_row(1, [1.0])], stage=2)
    for run, says in (
        (no_time, "no time in"),
        (stages, "several runs of one case"),
        (tmp_path / "x", "no run"),
    ):
        assert export(run, tmp_path / "b.json") == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
    assert not (tmp_path / "b.json").exists()
    assert export(stages / "stage1", tmp_path / "none" / "b.json") == 2
    assert "cannot write" in capsys.readouterr().err
