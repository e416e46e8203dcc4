"""The store, as outside readers use it: columns, types, stored files, appending and merging by copying folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command_line import Ended, rewritten, rows, run

DATA = Path(__file__).parent / "data"
COLUMNS = {  # name -> type on disk; more may be added
    "schema_version": "int32",
    "run_id": "string",
    "sweep": "string",
    "suite": "string",
    "case_id": "string",
    "arm": "string",
    "axes": "string",
    "resolved": "string",
    "metric": "string",
    "unit": "string",
    "better": "string",
    "samples": "list<element: double>",
    "rounds": "list<element: int32>",
    "value": "double",
    "status": "string",
    "reason": "string",
    "flops": "string",
    "bytes_moved": "double",
    "env_id": "string",
    "env": "string",
    "baseline": "string",
    "seed": "int64",
    "regime": "string",
    "timing": "string",
    "created_at": "string",
    "arm_fields": "string",
    "cause": "string",
    "retryable": "bool",
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_there_with_its_type(name: str, measured: Ended) -> None:
    for file in measured.path("results").glob("*.parquet"):
        assert str(pq.read_schema(file).field(name).type).replace("item:", "element:") == COLUMNS[name]
    assert name in rows(measured.path("results")).columns


def test_json_columns_are_json_and_a_value_is_the_median(measured: Ended, partly_failed: Ended) -> None:
    frame = rows([measured.path("results"), partly_failed.path("results")])
    for column in ("axes", "resolved", "flops", "env", "timing"):
        assert all(isinstance(json.loads(text), dict) for text in frame[column].unique()), column
    times = frame[(frame["metric"] == "time_ms") & (frame["status"] == "ok")]
    assert len(times)
    for row in times.itertuples():
        middle = sorted(row.samples)
        half = len(middle) // 2
        assert row.value == pytest.approx(
            middle[half] if len(middle) % 2 else (middle[half - 1] + middle[half]) / 2
        )
        assert len(row.rounds) == len(row.samples)
    assert set(frame["status"]) <= {"ok", "partial", "skipped", "failed"}
    assert set(frame["better"]) <= {"lower", "higher", "none"}
    assert (frame.loc[frame["status"] != "ok", "reason"] != "").all()


def test_every_row_has_its_conditions(measured: Ended) -> None:
    frame = rows(measured.path("results"))
    (env,) = frame["env"].unique()
    assert {"device", "torch", "triton", "python", "git_commit", "cpu", "threads", "host_hash"} <= json.loads(
        env
    ).keys()
    assert frame["env_id"].nunique() == 1


SCHEMA_4 = DATA / "schema-4"


def test_files_of_the_schema_are_read_and_a_deferred_row_gives_way() -> None:
    """Oracle: pyarrow on the same files. Two cases that a budget deferred were measured by a later part."""
    raw = [
        row for file in sorted(SCHEMA_4.glob("*.parquet")) for row in pq.ParquetFile(file).read().to_pylist()
    ]
    assert {row["schema_version"] for row in raw} == {4}
    deferred = {row["case_id"] for row in raw if row["cause"] == "budget"}
    assert len(deferred) == 2
    frame = rows(SCHEMA_4)
    assert frame.attrs["problems"] == []
    ok = sorted((r["case_id"], r["metric"], r["arm"], r["value"]) for r in raw if r["status"] == "ok")
    assert sorted(zip(frame["case_id"], frame["metric"], frame["arm"], frame["value"], strict=True)) == ok
    assert set(frame["status"]) == {"ok"}
    assert set(frame["case_id"]) == deferred


def test_a_stored_run_is_reported_diffed_and_judged(tmp_path: Path) -> None:
    run_of_then, copied = str(SCHEMA_4), str(rewritten(SCHEMA_4, tmp_path / "other", run_id="another"))
    assert run(tmp_path, "report", run_of_then, "-o", "old.html").code == 0
    assert run(tmp_path, "diff", run_of_then, copied).code == 0
    words = ("gate", "--baseline", run_of_then, "--candidate", copied, "--machine-free")
    assert run(tmp_path, *words).code == 0


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (3, ("report",)),
        (5, ("diff", str(SCHEMA_4))),
        (3, ("gate", "--baseline", str(SCHEMA_4), "--candidate")),
    ],
)
def test_rows_of_another_schema_are_refused_in_one_line(
    tmp_path: Path, version: int, words: tuple[str, ...]
) -> None:
    folder = rewritten(SCHEMA_4, tmp_path / "other", schema_version=version)
    line = run(tmp_path, *words, str(folder)).refused()
    assert f"schema_version {version}" in line
    assert "measure again" in line


def test_two_machines_merge_by_copying_folders(
    tmp_path: Path, measured: Ended, measured_again: Ended
) -> None:
    merged = tmp_path / "results"
    for ended in (measured, measured_again):
        shutil.copytree(ended.path("results"), merged / "cast" / ended.path("results").name)
    apart = sum(len(rows(ended.path("results"))) for ended in (measured, measured_again))
    frame = rows(merged)
    assert len(frame) == apart
    assert set(frame["run_id"]) == {ended.path("results").name for ended in (measured, measured_again)}
    shutil.copytree(measured.path("results"), merged / "a copy of it")
    assert len(rows(merged)) == apart


def test_files_and_folders_and_lists_of_both_are_read_alike(measured: Ended) -> None:
    folder = measured.path("results")
    (file,) = folder.glob("*.parquet")
    assert rows(folder).equals(rows(file))
    assert rows([file]).equals(rows([folder, file]))


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_read(tmp_path: Path, measured: Ended) -> None:
    shutil.copytree(measured.path("results"), tmp_path / "run")
    (tmp_path / "run" / "part-zz.parquet").write_bytes(b"PAR1 this is not parquet")
    with pytest.warns(RuntimeWarning, match="part-zz"):
        frame = rows(tmp_path)
    assert len(frame) == len(rows(measured.path("results")))
    (problem,) = frame.attrs["problems"]
    assert "part-zz.parquet" in problem


def test_a_path_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no-such-run"):
        rows(tmp_path / "no-such-run")


def test_what_is_known_of_the_code_stays_with_the_rows(measured: Ended) -> None:
    about = json.loads((measured.path("results") / "_run.json").read_text())
    assert set(rows(measured.path("results"))["run_id"]) == {about["run_id"]}
