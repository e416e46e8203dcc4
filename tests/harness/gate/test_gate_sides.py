"""Oracle: the exit codes of the contract; bad input is one clear line, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gate_fixtures import ENV, Times, case, time_row, write

from harness import store
from harness.__main__ import main
from harness.gate import _parse
from harness.gate.sides import differing_fields, load_side


def gate(tmp: Path, baseline: Path | str, candidate: Path | str, *more: str) -> int:
    return main(
        ["gate", "--baseline", str(baseline), "--candidate", str(candidate), "--results-dir", str(tmp), *more]
    )


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    times = Times()
    return (
        write(tmp_path / "a", [time_row(1, times())]),
        write(tmp_path / "b", [time_row(1, times())]),
    )


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    return err


def parts(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


def rewrite(file: Path, **columns: pa.Array | None) -> None:
    """Replaces columns of a Parquet file; None drops one."""
    table = pq.ParquetFile(file).read()
    for name, values in columns.items():
        place = table.column_names.index(name)
        table = table.remove_column(place)
        if values is not None:
            table = table.add_column(place, name, values)
    pq.write_table(table, file)


def test_a_missing_baseline_is_exit_5(
    tmp_path: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(tmp_path, "no-such-run", sides[1]) == 5
    assert "no run 'no-such-run'" in refused(capsys)


def test_a_missing_candidate_is_exit_2(
    tmp_path: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(tmp_path, sides[0], "no-such-run") == 2
    assert "candidate: no run" in refused(capsys)


@pytest.mark.parametrize(("which", "code"), [(0, 5), (1, 2)])
def test_an_empty_run(
    tmp_path: Path, sides: tuple[Path, Path], which: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in parts(sides[which]):
        file.unlink()
    assert gate(tmp_path, *sides) == code
    assert "no rows in" in refused(capsys)


def test_a_malformed_parquet_file_is_never_skipped(
    tmp_path: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The store skips what it can't read; a gate that did would lose cases in silence."""
    (sides[1] / "stage1" / "part-9.parquet").write_bytes(b"PAR1 this is no parquet")
    assert gate(tmp_path, *sides) == 2
    assert "cannot read" in refused(capsys)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"samples": pa.array([[1.0, float("nan")] * 5])}, "holds NaN"),
        ({"value": pa.array([float("nan")])}, "holds NaN"),
        ({"value": pa.array([None], pa.float64())}, "holds NaN"),
        ({"samples": pa.array([None], pa.list_(pa.float64()))}, "holds no samples"),
        ({"samples": pa.array([[]], pa.list_(pa.float64()))}, "holds no samples"),
        ({"samples": None}, "lacks columns"),
        ({"rounds": pa.array([[0, 1]])}, "does not record the rounds"),
        ({"rounds": None}, "lacks columns"),
        ({"case_id": None}, "lacks columns"),
        ({"suite": pa.array([None], pa.string())}, "lacks 'suite'"),
        ({"better": None}, "lacks columns"),
        ({"status": pa.array(["fine"])}, "has the status 'fine'"),
        ({"schema_version": pa.array([1], pa.int32())}, "schema_version 1"),
        ({"schema_version": None}, "has no rows of this store"),
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
    (file,) = parts(sides[1])
    rewrite(file, **columns)
    verdicts, page = tmp_path / "gate.json", tmp_path / "gate.md"
    verdicts.write_text("of an earlier gate")
    state = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p != verdicts}
    assert gate(tmp_path, *sides, "--json", str(verdicts), "--markdown", str(page)) == 2
    assert says in refused(capsys)
    assert {
        p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p not in (verdicts, page)
    } == state
    assert json.loads(verdicts.read_text())["exit_code"] == 2


def test_the_row_that_is_damaged_is_named(
    tmp_path: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(parts(sides[0])[0], samples=pa.array([[1.0, float("nan")] * 5]))
    assert gate(tmp_path, *sides) == 2
    assert f"baseline: the row time_ms of gemm/fp8, case {case(1).case_id}, holds NaN" in refused(capsys)


def test_runs_without_a_common_case_are_exit_5(
    tmp_path: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "c", [time_row(2, Times()())])
    assert gate(tmp_path, sides[0], other) == 5
    assert "no case is in both" in refused(capsys)


def test_rows_of_two_environments_on_one_side_are_refused(
    tmp_path: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(sides[1], [time_row(2, Times()())], stage=3, env={**ENV, "torch": "2.14"})
    assert gate(tmp_path, *sides) == 3
    assert "torch: 2.13.0+cu128 != 2.14" in refused(capsys)


def test_a_different_environment_is_exit_3_and_names_the_fields(
    tmp_path: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(
        tmp_path / "c", [time_row(1, Times()())], env={**ENV, "power_limit_w": 350.0, "driver": "575"}
    )
    assert gate(tmp_path, sides[0], other) == 3
    error = refused(capsys)
    assert "power_limit_w: 700.0 != 350.0" in error
    assert "driver: 570.124.06 != 575" in error
    assert "--machine-free" in error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "choose one"),
        (["--candidate", "x"], "needs --baseline"),
        (["--baseline", "x"], "choose one"),
        (["--against", "HEAD", "--baseline", "x"], "leave --baseline out"),
        (["--against", "HEAD", "--candidate", "x", "--baseline", "y"], "choose one"),
        (["--against", "HEAD", "--pairs", "0"], "--pairs 0 must be at least 1"),
        (["--baseline", "x", "--candidate", "y", "sweep=gate"], "only --against and --measure"),
        (["--baseline", "x", "--candidate", "y", "--tolerance", "3"], "unrecognized arguments"),
    ],
)
def test_usage(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", *words]) == 2
    assert says in refused(capsys)


def test_an_output_that_cannot_be_written_is_refused_before_judging(
    tmp_path: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(tmp_path, *sides, "--json", str(tmp_path / "nowhere" / "v.json")) == 2
    assert "nowhere is no folder" in refused(capsys)
    assert gate(tmp_path, *sides, "--markdown", str(tmp_path)) == 2
    assert "it is a folder" in refused(capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["--pairs", "3"], ["--confirm-pairs", "3"], ["--blocks", "2"], ["--budget-s", "0"], ["--alone"],
        ["--even-if-equal"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
@pytest.mark.parametrize("way", ["stored", "history", "measure"])
def test_options_of_measuring_are_refused_where_nothing_is_measured(
    tmp_path: Path,
    sides: tuple[Path, Path],
    words: list[str],
    way: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--measure has one side: it takes the counts, and not what is about two."""
    if way == "stored":
        assert gate(tmp_path, *sides, *words) == 2
    elif way == "history":
        assert main(["gate", "--history", str(sides[0]), *words]) == 2
    elif words[0] in ("--alone", "--even-if-equal"):
        assert main(["gate", "--measure", *words]) == 2
    else:
        assert getattr(_parse(["--measure", *words]), words[0][2:].replace("-", "_")) == float(words[1])
        return
    assert f"{words[0]} is about measuring: only --against " in refused(capsys)


def test_only_one_session_makes_pairs(tmp_path: Path) -> None:
    """A side whose runs come from two sittings has no session: its rounds are nobody's pairs."""
    folder = write(tmp_path / "a", [time_row(1, Times()())], session="S")
    assert load_side(folder, "baseline", "").session == "S"
    write(folder, [time_row(1, Times()())], session="T", stage=2)
    side = load_side(folder, "baseline", "")
    assert side.session == ""
    assert sorted(side.stages) == [1, 2]


def test_a_side_without_run_json_is_a_first_stage(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", [time_row(1, Times()())])
    (folder / "stage1" / "_run.json").unlink()
    side = load_side(folder, "baseline", "")
    assert (sorted(side.stages), side.session) == ([1], "")


def test_differing_fields_names_what_a_time_depends_on() -> None:
    assert differing_fields({"cuda": "12"}, {"cuda": "13", "host_hash": "x"}) == "cuda: 12 != 13"


def test_a_side_of_several_folders_is_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", [time_row(1, Times()())])
    write(folder, [time_row(2, Times()())], stage=2)
    frame = load_side(folder, "baseline", "").first
    assert isinstance(frame, pd.DataFrame)
    assert frame["case_id"].tolist() == [case(1).case_id]
    assert len(store.read(folder)) == 2
