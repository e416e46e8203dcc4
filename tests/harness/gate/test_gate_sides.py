"""What the gate takes and refuses: runs, damaged rows, pytest-benchmark files, words. Oracle: the exit codes of the contract."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gate_fixtures import ENV, Times, time_row, write

from harness.__main__ import main
from harness.gate import runner


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    times = Times()
    return write(tmp_path / "a", [time_row(1, times())]), write(tmp_path / "b", [time_row(1, times())])


def gate(baseline: Path | str, candidate: Path | str, *more: str) -> int:
    return main(["gate", "--baseline", str(baseline), "--candidate", str(candidate), *more])


def refused(capsys: pytest.CaptureFixture[str], *said: str) -> bool:
    """Whether nothing was printed but one line that says so."""
    out, err = capsys.readouterr()
    return (
        out == ""
        and err.count("\n") == 1
        and err.startswith("error: ")
        and all(words in err for words in said)
    )


def rewrite(file: Path, **columns: pa.Array | None) -> None:
    """Replaces columns of a Parquet file; None drops one."""
    table = pq.ParquetFile(file).read()
    for name, values in columns.items():
        place = table.column_names.index(name)
        table = table.remove_column(place)
        if values is not None:
            table = table.add_column(place, name, values)
    pq.write_table(table, file)


@pytest.mark.parametrize(
    ("which", "how", "code", "said"),
    [
        (1, "absent", 2, "candidate: no run"),
        (1, "empty", 2, "no rows in"),
        (1, "two environments", 3, "torch: 2.13.0+cu128 != 2.14"),
        (1, "other environment", 3, "driver: 570.124.06 != 575"),
    ],
)
def test_a_side_that_cannot_be_judged(
    tmp_path: Path,
    sides: tuple[Path, Path],
    which: int,
    how: str,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = sides[which]
    if how == "absent":
        folder = tmp_path / "none"
    elif how == "empty":
        next(folder.rglob("*.parquet")).unlink()
    elif how == "two environments":
        write(folder, [time_row(2, Times()())], stage=3, env={**ENV, "torch": "2.14"})
    else:
        folder = write(
            tmp_path / "c", [time_row(1, Times()())], env={**ENV, "power_limit_w": 350.0, "driver": "575"}
        )
    given = [folder if i == which else side for i, side in enumerate(sides)]
    assert gate(*given) == code
    assert refused(capsys, said)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"samples": pa.array([[1.0, float("nan")] * 5])}, "cannot read"),
        ({"rounds": None}, "cannot read"),
        ({"schema_version": pa.array([1], pa.int32())}, "schema_version 1"),
        ({"samples": pa.array(["text"])}, "cannot read"),
    ],
)
def test_a_damaged_row_is_refused_and_no_run_is_overwritten(
    tmp_path: Path,
    sides: tuple[Path, Path],
    columns: dict[str, Any],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A NaN would pass: nothing exceeds it."""
    rewrite(next(sides[1].rglob("*.parquet")), **columns)
    state = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert gate(*sides) == 2
    assert refused(capsys, says)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == state


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--candidate x",
        "--baseline x",
        "--against HEAD --baseline x",
        "--against HEAD --candidate x --baseline y",
        "--against HEAD --pairs 0",
        "--against HEAD --budget-s -1",
        "--baseline x --candidate y sweep=gate",
        "--baseline x --candidate y --pairs 3",
        "--baseline x --candidate y --budget-s 0",
        "--baseline x --candidate y --alone",
        "--measure --alone",
        "--measure --even-if-equal",
        "--baseline x --candidate y --tolerance 3",
        "--baseline a.json --candidate run",
        "--baseline run run2 --candidate run",
        "--against main --setup true",
        "--against main --unproven-tree ok",
        "--against main --command ' '",
        "--against main --command true sweep=cast",
        "--against main --command true --machine-free",
        "--against main --command true --blocks 3",
        "--against main --command true --alone",
        "--measure --command true",
        "--against main --command true --unproven-tree maybe",
    ],
)
def test_words_that_do_not_go_together(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", *shlex.split(words)]) == 2
    assert refused(capsys)


def test_a_file_is_no_baseline_to_measure_against_and_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner.Session, "run", lambda _: pytest.fail("it was measured"))
    (file,) = files(tmp_path, "a", 1)
    assert main(["gate", "--measure", "--baseline", file]) == 2
    assert refused(capsys, "cannot read")


def test_a_sweep_that_cannot_be_planned_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "--measure", "sweep=none"]) == 2
    assert refused(capsys, "none")


# pytest-benchmark files, a process each


def files(
    tmp: Path, side: str, count: int, factor: float = 1.0, *, slow: float = 1.0, cpu: str = "AMD"
) -> list[str]:
    """Each process has a speed of its own, by 0.5 %, and its samples lie close together; one test of six may be slow."""
    random = np.random.default_rng([ord(side[0]), count])
    names = []
    for number in range(count):
        tests = []
        for n in range(6):
            own = 0.001 * factor * (slow if n == 2 else 1.0) * np.exp(random.normal(0, 0.005))
            stats = {"median": 1.0, "data": list(own * np.exp(random.normal(0, 0.001, 40)))}
            tests.append({"fullname": f"t.py::test_{n}", "group": None, "stats": stats})
        machine = {"node": "n", "system": "Linux", "cpu": {"brand_raw": cpu, "count": 8}}
        file = tmp / f"{side}{number}.json"
        file.write_text(
            json.dumps({"machine_info": machine, "commit_info": {"id": side}, "benchmarks": tests})
        )
        names.append(str(file))
    return names


def judged(tmp: Path, a: list[str], b: list[str]) -> tuple[int, dict[str, Any]]:
    code = main(["gate", "--baseline", *a, "--candidate", *b, "--json", str(tmp / "v.json")])
    return code, json.loads((tmp / "v.json").read_text())


def test_one_file_a_side_decides_nothing(tmp_path: Path) -> None:
    """40 samples of one process are one round, however far apart the sides are."""
    found, document = judged(tmp_path, files(tmp_path, "a", 1), files(tmp_path, "b", 1, 2.0))
    assert (found, document["verdict"]) == (6, "COULD NOT JUDGE 6 of 6")
    assert any("8 a side can decide" in note for note in document["notes"])


@pytest.mark.parametrize(("counted", "code"), [(2_000_000, 0), (2_200_000, 1)])
def test_counts_of_instructions_are_judged_though_all_are_equal(
    tmp_path: Path, counted: int, code: int
) -> None:
    """A time that is one tick of its clock decides nothing; a count has no tick."""
    names: dict[str, list[str]] = {"a": [], "b": []}
    for side, data in (("a", 2_000_000), ("b", counted)):
        for n in range(8):
            test = {"fullname": "t.py::x", "stats": {"data": [data]}, "extra_info": {"process": n}}
            (tmp_path / f"{side}{n}.json").write_text(
                json.dumps({"commit_info": {"id": side}, "benchmarks": [test]})
            )
            names[side].append(str(tmp_path / f"{side}{n}.json"))
    assert judged(tmp_path, *names.values())[0] == code


def test_files_leave_nothing_beside_the_folder_for_what_is_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The salt of a results folder would lie two folders above a run: here "/" for a user whose TMPDIR is /tmp."""
    (tmp_path / "root/tmp").mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "root/tmp"))
    judged(tmp_path, files(tmp_path, "a", 2), files(tmp_path, "b", 2))
    assert [*(tmp_path / "root").rglob("*")] == [tmp_path / "root/tmp"]


def test_files_that_are_no_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies of one file: gate_situations.py."""
    a, b, other = files(tmp_path, "a", 1), files(tmp_path, "b", 8), files(tmp_path, "other", 1, cpu="Another")
    for names, code, said in (([*a, *other], 3, "cpu: "), (["none.json"], 2, "cannot read none.json")):
        assert main(["gate", "--baseline", *names, "--candidate", *b]) == code
        assert refused(capsys, said)
