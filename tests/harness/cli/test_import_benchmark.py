"""Oracle: pytest-benchmark itself, run on a two-test suite, and its documented format."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from harness import store
from harness.__main__ import main
from harness.store.outside import parse

DOCUMENT: dict[str, Any] = {
    "machine_info": {
        "node": "secret-host", "processor": "x86_64", "system": "Linux", "release": "6.1", "python_version": "3.11.7",
        "cpu": {"brand_raw": "AMD EPYC 7B13", "count": 8},
    },
    "commit_info": {"id": "abc" * 13 + "d", "dirty": True},
    "benchmarks": [
        {
            "fullname": "t.py::test_a[8]", "group": None, "extra_info": {"size": 8},
            "stats": {"median": 0.002, "hd15iqr": 0.1, "iterations": 3, "data": [0.001 * (1 + i) for i in range(40)]},
        },
        {"fullname": "t.py::test_b", "group": "g", "extra_info": {}, "stats": {"median": 0.5, "iterations": 1}},
    ],
    "datetime": "2026-11-21T08:00:00.123456+00:00",
    "version": "5.3.1",
}  # fmt: skip


def written(tmp: Path, document: Any) -> Path:
    file = tmp / "b.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return file


def imported(tmp: Path, document: Any) -> int:
    return main(["import", str(written(tmp, document)), "--results-dir", str(tmp / "r")])


def test_a_file_becomes_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert imported(tmp_path, DOCUMENT) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("imported 2 tests\nresults  ")
    assert "1 of 2 tests hold no raw times" in captured.err
    rows = store.read(tmp_path / "r").set_index("case_id")
    raw = next(row for row in rows.itertuples() if "test_a" in row.axes)
    assert raw.samples.tolist() == pytest.approx([1.0 + i for i in range(40)])  # ms
    assert raw.rounds.tolist() == [0] * 40  # one process is one round
    assert json.loads(raw.resolved)["extra_info"] == {"size": 8}
    assert "hd15iqr" not in raw.resolved + raw.timing
    env = json.loads(raw.env)
    assert (env["cpu"], env["git_commit"], env["git_dirty"]) == ("AMD EPYC 7B13", "abc" * 13 + "d", True)
    assert "secret-host" not in raw.env
    assert datetime.fromisoformat(raw.created_at) == datetime(2026, 11, 21, 8, 0, 0, 123000, UTC)
    bare = next(row for row in rows.itertuples() if "test_b" in row.axes)
    assert bare.samples.tolist() == [500.0]


def test_a_folder_of_imported_runs_has_a_round_a_file(tmp_path: Path) -> None:
    for side, factor in (("a", 1.0), ("b", 2.0)):
        (tmp_path / side).mkdir()
        for number in range(8):
            document = copy.deepcopy(DOCUMENT)
            document["benchmarks"] = document["benchmarks"][:1]
            stats = document["benchmarks"][0]["stats"]
            stats["data"] = [factor * (1 + 0.001 * number) * x for x in stats["data"]]
            assert imported(tmp_path / side, document) == 0
    words = ["--baseline", str(tmp_path / "a" / "r"), "--candidate", str(tmp_path / "b" / "r")]
    assert main(["gate", *words, "--json", str(tmp_path / "v.json")]) == 1
    (finding,) = json.loads((tmp_path / "v.json").read_text())["findings"]
    assert (finding["verdict"], finding["rounds"]) == ("REGRESSED", 8)


def test_what_pytest_benchmark_writes_today_is_read(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_sum(benchmark):\n    benchmark.pedantic(sum, args=([1] * 100,), rounds=7)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "test_it.py"]
    command += ["--rootdir", str(tmp_path), "--benchmark-json=b.json", "--benchmark-save-data"]
    # pytest-benchmark measures nothing in a worker of pytest-xdist, which this process may be
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env=alone)
    assert main(["import", str(tmp_path / "b.json"), "--results-dir", str(tmp_path / "r")]) == 0
    (row,) = store.read(tmp_path / "r").itertuples()
    data = json.loads((tmp_path / "b.json").read_text())["benchmarks"][0]["stats"]["data"]
    assert row.samples.tolist() == pytest.approx([1e3 * x for x in data])
    assert row.value == pytest.approx(sorted(1e3 * x for x in data)[3])


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("{", "cannot read"),
        ({"results": [{"command": "x", "times": [1.0]}]}, "hyperfine"),
        ({"benchmarks": []}, "contains no benchmark"),
        ({"benchmarks": [{"fullname": "t"}]}, "KeyError: 'stats'"),
        ([], "is not as pytest-benchmark"),
        ({"machine_info": {"cpu": "AMD"}, "benchmarks": []}, "is not as pytest-benchmark"),
        ({"benchmarks": [3]}, "is not as pytest-benchmark"),
        ({"benchmarks": [{"fullname": 3, "stats": {"data": [1]}}]}, "is not as pytest-benchmark"),
        (
            {"benchmarks": [{"fullname": "x", "stats": {"data": [1]}, "extra_info": "y"}]},
            "is not as pytest-benchmark",
        ),
        (
            {"benchmarks": [{"fullname": "t", "stats": {"data": [1.0, float("nan")]}}]},
            "not a positive number",
        ),
        ({"benchmarks": [{"fullname": "t", "stats": {"data": ["x"]}}]}, "is not as pytest-benchmark"),
    ],
)
def test_bad_files_are_one_line_and_write_nothing(
    tmp_path: Path, document: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported(tmp_path, document) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "r").exists()


RESULTS = {  # as asv 0.6.6 wrote them with --quick --record-samples, shortened
    "commit_hash": "9d2eb37484ae6f20ce0866ff08c3a181d6997961",
    "env_name": "existing",
    "date": 1795951790000,
    "params": {"cpu": "Intel(R) Xeon(R) Processor", "machine": "vm", "num_cpu": "2", "os": "Linux 6.18.44"},
    "python": "3.11",
    "result_columns": ["result", "params", "version", "stats_ci_99_a", "samples"],
    "results": {
        "bench.Sizes.time_sum": [
            [2.5e-06, 1.6e-05, float("nan"), None],
            [["10", "1000"], ["'a'", "'b'"]],
            "d02d",
            [float("-inf")] * 4,
            [[2.5e-06, 2.7e-06], [1.6e-05], None, None],
        ],
        "bench.peakmem_list": [[24731648], [], "5980"],
        "bench.time_fails": [None, [], "e056"],
    },
    "version": 2,
}
MEAN = {"tag": "nv/cold/time/gpu/mean", "data": [{"name": "value", "type": "float64", "value": "0.0015"}]}
STATES = {  # the keys that nvbench's `json_printer.cu` writes
    "devices": [{"name": "NVIDIA H200"}],
    "benchmarks": [
        {
            "name": "copy",
            "states": [
                {
                    "name": "Device=0 N=2^20",
                    "is_skipped": False,
                    "summaries": [MEAN],
                },
                {"name": "Device=0 N=2^40", "is_skipped": True, "summaries": [MEAN]},
            ],
        }
    ],
}


def test_asv_samples_units_and_what_did_not_run(tmp_path: Path) -> None:
    """Oracle: the file. NaN is a skipped combination, null a failed one; `benchmarks.json` holds the unit."""
    (tmp_path / "results" / "vm").mkdir(parents=True)
    file = tmp_path / "results" / "vm" / "9d2eb374.json"
    file.write_text(json.dumps(RESULTS))
    about = {
        "bench.peakmem_list": {"unit": "bytes"},
        "bench.Sizes.time_sum": {"unit": "seconds"},
        "version": 2,
    }
    (tmp_path / "results" / "benchmarks.json").write_text(json.dumps(about))
    assert main(["import", str(file), "--results-dir", str(tmp_path / "r")]) == 0
    rows = {parse(row.axes)["test"]: row for row in store.read(tmp_path / "r").itertuples()}
    assert rows.keys() == {f"bench.Sizes.time_sum({n})" for n in ("10, 'a'", "10, 'b'")} | {
        "bench.peakmem_list"
    }
    assert rows["bench.Sizes.time_sum(10, 'a')"].samples.tolist() == pytest.approx([2.5e-3, 2.7e-3])
    assert parse(rows["bench.Sizes.time_sum(10, 'a')"].resolved)["unit"] == "s"
    assert parse(rows["bench.peakmem_list"].resolved)["unit"] == "bytes"
    assert parse(rows["bench.peakmem_list"].timing)["method"] == "asv"
    env = parse(rows["bench.peakmem_list"].env)
    assert (env["git_commit"], env["imported_from"]) == (RESULTS["commit_hash"], "asv")


def test_nvbench_states(tmp_path: Path) -> None:
    """Oracle: the file. A skipped state has no row, and the device is its GPU."""
    assert imported(tmp_path, STATES) == 0
    (row,) = store.read(tmp_path / "r").itertuples()
    assert row.samples.tolist() == pytest.approx([1.5])
    env = parse(row.env)
    assert (env["device"], env["gpu"], env["imported_from"]) == ("cuda", "NVIDIA H200", "nvbench")
    assert parse(row.axes)["test"] == "copy Device=0 N=2^20"


@pytest.mark.parametrize(
    "change", [{"results": 3}, {"result_columns": []}, {"params": None}, {"date": "x"}, {"results": {}}]
)
def test_a_bent_asv_file_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    assert imported(tmp_path, {**RESULTS, **change}) == 2
    assert not (tmp_path / "r").exists()
