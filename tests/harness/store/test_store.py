"""Oracle: what was appended; a later attempt replaces a whole case and nothing else."""

from __future__ import annotations

import errno
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_rows import rows, trial, writer

from harness import store
from harness.store import parquet
from harness.store.cause import RETRYABLE, Cause
from harness.store.json_columns import parse
from harness.store.measurement import Measurement


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    run = writer(tmp_path / "w" / "r1")
    run.append(rows("c1", 1.5))
    run.append(rows("c2", 2.5))
    frame = store.read(tmp_path)
    assert frame["value"].tolist() == [1.5, 2.5]
    assert frame["samples"].map(list).tolist() == [[1.5, 1.5], [2.5, 2.5]]
    assert set(frame["env_id"]) == {"e1"}
    assert frame.attrs["problems"] == []


def test_closing_gathers_the_parts_without_changing_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "r1"
    run = writer(folder)
    for i in range(5):
        run.append(rows(f"c{i}", float(i)))
    before = store.read(folder)
    run.close("finished")
    assert len(list(folder.glob("*.parquet"))) == 1
    assert store.read(folder).equals(before)
    assert store.read_about(folder)["state"] == "finished"


def test_a_kill_between_compaction_and_removal_counts_no_row_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r1"
    run = writer(folder)
    run.append(rows("c1"))
    run.append(rows("c2"))
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    run.close("finished")
    assert len(list(folder.glob("*.parquet"))) == 3
    assert sorted(store.read(folder, all_attempts=True)["case_id"]) == ["c1", "c2"]


def test_a_corrupt_part_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    run = writer(tmp_path / "r1")
    run.append(rows("c1"))
    bad = tmp_path / "r1" / "part-zz.parquet"
    bad.write_bytes(b"PAR1 this is not parquet")
    with pytest.warns(RuntimeWarning, match="part-zz.parquet"):
        frame = store.read(tmp_path)
    assert frame["case_id"].tolist() == ["c1"]
    assert len(frame.attrs["problems"]) == 1
    assert frame.attrs["problems"][0].startswith(f"{bad}: ")


@pytest.mark.parametrize("keep", [0, 3, 10, 200])
def test_a_truncated_part_is_named(tmp_path: Path, keep: int) -> None:
    run = writer(tmp_path / "r1")
    run.append(rows("c1"))
    run.append(rows("c2"))
    part = sorted((tmp_path / "r1").glob("part-*"))[1]
    part.write_bytes(part.read_bytes()[:keep])
    with pytest.warns(RuntimeWarning, match=part.name):
        assert store.read(tmp_path)["case_id"].tolist() == ["c1"]


def test_rows_reach_the_disk_before_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that shows before its content would be an empty file after a power cut (man 2 fsync)."""
    done: list[str] = []
    sync, rename = parquet.os.fsync, Path.replace
    monkeypatch.setattr(parquet.os, "fsync", lambda file: (done.append("content"), sync(file)))
    monkeypatch.setattr(Path, "replace", lambda old, new: (done.append("name"), rename(old, new))[1])
    writer(tmp_path).append(rows("c"))
    assert done[-2:] == ["content", "name"]


def test_a_full_disk_leaves_earlier_rows_and_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = writer(tmp_path / "r1")
    run.append(rows("c1"))

    def full(table: pa.Table, file: Any, **options: Any) -> None:
        file.write(b"PAR1")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        run.append(rows("c2"))
    assert store.read(tmp_path)["case_id"].tolist() == ["c1"]
    assert not list((tmp_path / "r1").glob("*.tmp"))


def test_a_later_attempt_replaces_the_whole_case_and_only_that(tmp_path: Path) -> None:
    folder = tmp_path / "r1"
    first = writer(folder)
    first.append(rows("c1", 1.0) + rows("c1", 1.0, arm="b"))
    first.append(rows("c2", 2.0))
    first.close("interrupted")
    second = writer(folder)
    second.append(rows("c1", 9.0))
    second.close("finished")
    frame = store.read(folder)
    assert sorted(zip(frame["case_id"], frame["arm"], frame["value"], strict=True)) == [
        ("c1", "a", 9.0), ("c2", "a", 2.0),
    ]  # fmt: skip
    assert len(store.read(folder, all_attempts=True)) == 4


def test_the_later_attempt_wins_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r1"
    writer(folder).append(rows("c1", 1.0))
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 3600 * 10**9)
    writer(folder).append(rows("c1", 2.0))
    writer(folder).append(rows("c1", 3.0))
    assert store.read(folder)["value"].tolist() == [3.0]
    assert len(store.read(folder, all_attempts=True)) == 3


@pytest.mark.parametrize("behind", [False, True])
def test_two_writers_that_begin_at_once_have_attempts_of_their_own(
    behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one tick of the clock, and with clocks that both lie behind the last attempt: what each adds to it is drawn."""
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    if behind:
        writer(tmp_path / "r1").append(rows("c9"))
        now -= 3600 * 10**9
    for run in [writer(tmp_path / "r1") for _ in range(2)]:
        run.append(rows("c1"))
    assert (store.read(tmp_path)["case_id"] == "c1").sum() == 1


@pytest.mark.parametrize("later", ["shard-0-of-3", "shard-1-of-2", "."])
def test_the_later_attempt_wins_though_another_shard_was_written_by_a_clock_ahead(
    later: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 3600 * 10**9)
    writer(tmp_path / "r1" / "shard-0-of-2", run_id="r1").append(rows("c1", 1.0))
    monkeypatch.setattr(time, "time_ns", real)
    writer(tmp_path / "r1" / later, run_id="r1").append(rows("c1", 2.0))
    assert store.read(tmp_path)["value"].tolist() == [2.0]


def test_a_duplicate_that_is_killed_early_hides_no_run_that_it_did_not_make(tmp_path: Path) -> None:
    """The runs of a trial suite are stored one by one; the arms of a timed case are one measurement."""
    first = writer(tmp_path / "r1")
    first.append(trial("c1", "p", 1.0))
    second = writer(tmp_path / "r1")
    first.append(trial("c1", "q", 1.0))
    first.append(trial("c1", "r", 1.0))
    first.append(rows("c2", 1.0) + rows("c2", 1.0, arm="b"))
    first.close("finished")
    second.append(trial("c1", "p", 2.0))
    second.append(rows("c2", 2.0))
    frame = store.read(tmp_path).sort_values(["case_id", "arm"])
    found = list(zip(frame["case_id"], frame["arm"], frame["value"], strict=True))
    assert found == [("c1", "p", 2.0), ("c1", "q", 1.0), ("c1", "r", 1.0), ("c2", "a", 2.0)]


@pytest.mark.parametrize("why", sorted(RETRYABLE))
@pytest.mark.parametrize("kind", ["timed", "trial"])
def test_an_attempt_that_was_put_off_replaces_no_measured_row(kind: str, why: Cause, tmp_path: Path) -> None:
    """A later duplicate that came to nothing; where nothing else is known, the last such attempt stands."""

    def waiting(case: str, more: str) -> list[Measurement]:
        if kind == "trial":
            return trial(case, "a", reason=more, cause=why)
        return [
            Measurement("s", case, arm, "{}", "time_ms", "failed", reason=more, cause=why)
            for arm in ("a", "b")
        ]

    early = writer(tmp_path / "r1")
    early.append(waiting("c1", "first") + waiting("c2", "first"))
    measured = writer(tmp_path / "r1")
    measured.append(trial("c1", "a", 2.0) if kind == "trial" else rows("c1", 2.0) + rows("c1", 2.0, arm="b"))
    late = writer(tmp_path / "r1")
    late.append(waiting("c1", "last") + waiting("c2", "last"))
    frame = store.read(tmp_path)
    assert set(frame[frame["case_id"] == "c1"]["value"]) == {2.0}
    assert set(frame[frame["case_id"] == "c2"]["reason"]) == {"last"}
    assert len(frame) == (2 if kind == "trial" else 4)


def test_an_attempt_that_measured_some_arms_stands_before_one_that_measured_none(tmp_path: Path) -> None:
    """An arm killed its process, the others were timed; the resumed case had no time left; a later one had."""
    done, late = (
        rows("c1", 1.0),
        Measurement("s", "c1", "a", "{}", "time_ms", "skipped", reason="spent", cause=Cause.BUDGET),
    )
    died = Measurement("s", "c1", "b", "{}", "time_ms", "failed", reason="twice", cause=Cause.DIED)
    writer(tmp_path / "r1").append([*done, died])
    writer(tmp_path / "r1").append([late, replace(late, arm="b")])
    assert store.read(tmp_path)["status"].tolist() == ["ok", "failed"]
    writer(tmp_path / "r1").append([*rows("c1", 2.0), replace(died, reason="again")])
    assert store.read(tmp_path)["value"].tolist()[0] == 2.0
    writer(tmp_path / "r1").append(rows("c1", 3.0) + rows("c1", 3.0, arm="b"))
    writer(tmp_path / "r1").append([late, replace(late, arm="b")])
    assert store.read(tmp_path)["value"].tolist() == [3.0, 3.0]


def test_another_failure_is_a_result_that_replaces_the_one_before(tmp_path: Path) -> None:
    for reason in ("", "loss is nan at step 3"):
        writer(tmp_path / "r1").append(trial("c1", "a", reason=reason))
    assert store.read(tmp_path)["reason"].tolist() == ["loss is nan at step 3"]


# JSON columns


@pytest.mark.parametrize("column", ["axes", "resolved", "flops", "timing", "env"])
@pytest.mark.parametrize("text", ["{", "not json", "[1]", "3", '"x"', "{" * 3000, '{"a":1}x', "nan"])
def test_a_column_that_is_no_json_object_is_named_and_its_row_is_kept(
    column: str, text: str, tmp_path: Path
) -> None:
    writer(tmp_path / "r1").append(rows("c1"))
    (part,) = (tmp_path / "r1").glob("part-*")
    table = pq.read_table(part)
    place = table.schema.get_field_index(column)
    pq.write_table(table.set_column(place, column, pa.array([text])), part)
    with pytest.warns(RuntimeWarning, match=f"column '{column}' of 1 of 1 rows is no JSON object"):
        frame = store.read(tmp_path, expand=True)
    assert frame[column].tolist() == ["{}"]
    assert frame["value"].tolist() == [1.0]
    (problem,) = frame.attrs["problems"]
    assert problem.startswith(f"{part}: column {column!r}")
    assert frame.attrs["damaged"] == [problem]


@pytest.mark.parametrize("command", ["report", "diff", "fleet", "gate"])
def test_no_command_has_a_traceback_over_an_environment_that_is_no_json(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.__main__ import main

    monkeypatch.chdir(tmp_path)
    run = writer(tmp_path / "r1")
    run._constant["env"] = "{torn"
    run.append(rows("c1"))
    run.close("finished")
    words = {
        "report": ["report", "r1", "-o", "out.html"],
        "diff": ["diff", "r1", "r1"],
        "fleet": ["fleet", "r1"],
        "gate": ["gate", "--baseline", "r1", "--candidate", "r1"],
    }[command]
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    if command in ("diff", "gate"):
        assert code == 2
        assert "column 'env' of 1 of 1 rows is no JSON object" in " ".join((said.out + said.err).split())


def test_axes_are_columns_where_they_are_asked_for(tmp_path: Path) -> None:
    made = [
        Measurement("s", f"c{i}", "a", text, "time_ms", "ok", samples=(1.0,))
        for i, text in enumerate(('{"M":512,"seed":7,"role":"output"}', '{"M":1024}', "{}"))
    ]
    writer(tmp_path / "r1").append(made)
    frame = store.read(tmp_path)
    assert frame.case_axes.tolist() == frame["axes"].tolist() == [m.axes for m in made]
    assert "M" not in frame.columns
    wide = store.read(tmp_path, expand=True)
    assert wide.M.tolist()[:2] == [512, 1024]
    assert wide.M.isna().tolist() == [False, False, True]
    assert wide["role"].tolist()[0] == "output"
    assert wide["axes.seed"].tolist()[0] == 7
    assert wide["seed"].tolist() == [0, 0, 0]
    assert wide.drop(columns=["M", "role", "axes.seed"]).equals(frame)


def test_a_text_is_parsed_once_and_cannot_be_changed_by_who_reads_it() -> None:
    text = '{"gpu": "H200", "nested": {"a": 1}}'
    one = parse(text)
    assert one is parse(text)
    assert dict(one) == json.loads(text)
    with pytest.raises(TypeError, match="does not support item assignment"):
        one["gpu"] = "H100"  # type: ignore[index]
    for nothing in ("", None, float("nan")):
        assert dict(parse(nothing)) == {}
    with pytest.raises(ValueError, match="no JSON object: '\\[1\\]'"):
        parse("[1]")
