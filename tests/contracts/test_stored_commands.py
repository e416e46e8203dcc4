"""Commands that read stored runs: report, diff, fleet, import. Oracle: the rows, as the public reader gives them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended, rewritten, rows, run, scaled


def test_report_writes_a_page_and_its_twin_and_names_both(
    tmp_path: Path, measured: Ended, measured_again: Ended
) -> None:
    runs = [str(ended.path("results")) for ended in (measured, measured_again)]
    ended = run(tmp_path, "report", *runs, "-o", "both.html")
    assert ended.code == 0
    assert [line.split() for line in ended.out] == [["report", "both.html"], ["markdown", "both.md"]]
    assert ended.path("report").read_text().startswith("<!doctype html>")
    assert ended.path("markdown").read_text().startswith("# ")


def test_the_same_rows_give_the_same_bytes(tmp_path: Path, measured: Ended) -> None:
    for name in ("a", "b"):
        assert run(tmp_path, "report", str(measured.path("results")), "-o", f"{name}.html").code == 0
    assert (tmp_path / "a.md").read_bytes() == (tmp_path / "b.md").read_bytes()


def test_reading_and_judging_need_no_torch(tmp_path: Path, measured: Ended) -> None:
    folder = str(measured.path("results"))
    rewritten(measured.path("results"), tmp_path / "another", run_id="another-run")  # else the gate refuses
    code = (
        "import runpy, sys\n"
        "for words in (['--help'], ['report', sys.argv[1], '-o', 'x.html'], ['diff', sys.argv[1], sys.argv[1]],\n"
        "              ['gate', '--baseline', sys.argv[1], '--candidate', 'another'], ['runs', f'results_dir={sys.argv[1]}/..'],\n"
        "              ['fleet', sys.argv[1]], ['no_such_command']):\n"
        "    sys.argv[1:], kept = words, sys.argv[1]\n"
        "    try:\n"
        "        runpy.run_module('harness', run_name='__main__', alter_sys=True)\n"
        "    except SystemExit as end:\n"
        "        print(words[0], end.code, file=sys.stderr)\n"
        "    sys.argv[1:] = [kept]\n"
        "assert not {'torch', 'triton', 'fp8core'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ended = [line for line in done.stderr.splitlines() if not line.startswith(("error", "warning"))]
    # gate 6: the run has two rounds, which decide no time, and undecided is not OK
    assert ended == ["--help 0", "report 0", "diff 0", "gate 6", "runs 0", "fleet 0", "no_such_command 2"]


def test_diff_of_two_runs_as_plain_values(tmp_path: Path, measured: Ended) -> None:
    folder = str(measured.path("results"))
    ended = run(tmp_path, "diff", folder, folder, "json=true")
    assert ended.code == 0
    document = json.loads("\n".join(ended.out))
    assert document.keys() >= {
        "environment", "resolved", "only_before", "only_after", "broken", "times", "parts", "figures",
    }  # fmt: skip
    frame = rows(measured.path("results"))
    assert {time["case_id"] for time in document["times"]} == set(frame["case_id"])
    assert {time["ratio"] for time in document["times"]} == {1.0}
    assert document["environment"] == {}


def test_fleet_of_one_machine_judges_nothing(tmp_path: Path, measured: Ended) -> None:
    ended = run(tmp_path, "fleet", str(measured.path("results")), "json=true")
    assert ended.code == 0
    assert json.loads("\n".join(ended.out))["code"] == "not_judged"


@pytest.mark.parametrize(("slow", "code"), [(1.0, 0), (1.5, 1)])
def test_fleet_names_the_slow_machine_and_is_exit_1(
    slow: float, code: int, tmp_path: Path, measured: Ended
) -> None:
    """Five made-up machines that measured the same cases; the last one takes `slow` times as long."""
    for number in range(5):
        env = json.loads(rows(measured.path("results"))["env"][0]) | {"host_hash": str(number) * 12}
        rewritten(
            measured.path("results"),
            tmp_path / f"card{number}",
            run_id=f"card{number}",
            env_id=f"e{number}",
            env=json.dumps(env, sort_keys=True),
            **scaled("time_ms", (1 + 0.001 * number) * (slow if number == 4 else 1.0)),
        )
    assert run(tmp_path, "fleet", *(f"card{number}" for number in range(5)), "json=true").code == code


BENCHMARK: dict[str, Any] = {
    "machine_info": {
        "node": "secret-host", "processor": "x86_64", "system": "Linux", "release": "6.1", "python_version": "3.11.7",
        "cpu": {"brand_raw": "AMD EPYC 7B13", "count": 8},
    },
    "commit_info": {"id": "abc" * 13 + "d", "dirty": True},
    "benchmarks": [
        {
            "fullname": "t.py::test_a[8]", "group": None, "extra_info": {"size": 8},
            "stats": {"median": 0.002, "iterations": 3, "data": [0.002 + 1e-6 * (i % 7) for i in range(40)]},
        }
    ],
    "datetime": "2026-11-21T08:00:00.123456+00:00",
    "version": "5.3.1",
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "b.json"
    path.write_text(json.dumps(BENCHMARK))
    return path


def test_import_makes_a_run_and_names_it(tmp_path: Path, file: Path) -> None:
    ended = run(tmp_path, "import", str(file))
    assert ended.code == 0
    folder = ended.path("results")
    assert folder.parent == tmp_path / "results" / "pytest-benchmark"
    (row,) = rows(folder).itertuples()
    assert (row.suite, row.metric, row.unit, row.better) == ("pytest-benchmark", "time_ms", "ms", "lower")
    assert row.samples.tolist() == pytest.approx(
        [1e3 * x for x in BENCHMARK["benchmarks"][0]["stats"]["data"]]
    )
    assert "secret-host" not in row.env


def test_import_refuses_the_same_file_twice(tmp_path: Path, file: Path) -> None:
    folder = run(tmp_path, "import", str(file)).path("results")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert folder.name in run(tmp_path, "import", str(file)).refused()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
