"""Oracle: the rows that were appended, and pyarrow for what lies on disk."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness import store
from harness.errors import UsageError
from harness.measurement import Measurement


def rows(case: str, value: float = 1.0, arm: str = "a") -> list[Measurement]:
    return [Measurement("s", case, arm, "{}", "time_ms", "ok", samples=(value, value))]


def writer(folder: Path, **changes: Any) -> store.RunWriter:
    given: dict[str, Any] = {
        "run_id": folder.name,
        "sweep": "w",
        "env_id": "e1",
        "env": {"gpu": None},
        "about": {},
    }
    return store.RunWriter(folder, **(given | changes))


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
    sync, rename = store.os.fsync, Path.replace
    monkeypatch.setattr(store.os, "fsync", lambda file: (done.append("content"), sync(file)))
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
    monkeypatch.setattr(store.time, "time_ns", lambda: real() - 3600 * 10**9)
    writer(folder).append(rows("c1", 2.0))
    writer(folder).append(rows("c1", 3.0))
    assert store.read(folder)["value"].tolist() == [3.0]
    assert len(store.read(folder, all_attempts=True)) == 3


def test_a_duplicate_shard_counts_once(tmp_path: Path) -> None:
    """The same cases, measured by two writers of one run in two folders that are then copied together."""
    for name, value in (("shard", 1.0), ("again", 2.0)):
        writer(tmp_path / name / "r1", run_id="r1").append(rows("c1", value) + rows("c1", value, arm="b"))
    assert store.read(tmp_path)["value"].tolist() == [2.0, 2.0]


def test_a_long_run_is_gathered_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "GATHERED", 4)
    run = writer(tmp_path / "r1")
    for i in range(10):
        run.append(rows(f"c{i}", float(i)))
        assert len(list((tmp_path / "r1").glob("part-*"))) < 4
    run.close("finished")
    assert len(list((tmp_path / "r1").glob("*.parquet"))) == 3
    assert sorted(store.read(tmp_path)["value"]) == [float(i) for i in range(10)]


def test_rows_of_another_device_say_so(tmp_path: Path) -> None:
    run = writer(tmp_path / "r1")
    run.append(rows("c1"))
    run.append(rows("c2"), ("e2", {"gpu": "other"}))
    frame = store.read(tmp_path).set_index("case_id")
    assert frame["env_id"].to_dict() == {"c1": "e1", "c2": "e2"}
    assert frame.loc["c2", "env"] == '{"gpu":"other"}'


def test_rows_of_an_older_harness_were_tried_once(tmp_path: Path) -> None:
    old = pa.table({"schema_version": [2], "case_id": ["c1"], "value": [3.0]})
    pq.write_table(old, tmp_path / "part-old.parquet")
    assert store.read(tmp_path)["tries"].tolist() == [1]


def test_two_machines_merge_by_copying_folders(tmp_path: Path) -> None:
    for run_id, env in (("r1", "e1"), ("r2", "e2")):
        run = writer(tmp_path / "w" / run_id, env_id=env)
        run.append(rows("c1"))
        run.close("finished")
    assert set(store.read(tmp_path)["env_id"]) == {"e1", "e2"}


def test_two_writers_of_one_run_do_not_touch_each_other(tmp_path: Path) -> None:
    one, two = writer(tmp_path / "r1"), writer(tmp_path / "r1")
    for i in range(3):
        one.append(rows(f"one{i}"))
        two.append(rows(f"two{i}"))
    one.close("finished")
    two.append(rows("late"))
    assert len(store.read(tmp_path)) == 7


def test_rows_of_an_older_schema_are_read_with_nulls_and_as_of_the_whole(tmp_path: Path) -> None:
    old = pa.table({"schema_version": [1], "case_id": ["c1"], "value": [3.0], "gone": ["x"]})
    pq.write_table(old, tmp_path / "part-old.parquet")
    frame = store.read(tmp_path)
    assert frame.loc[0, "value"] == 3.0
    assert frame["timing"].isna().all()
    assert frame["part"].tolist() == [""]
    assert list(frame.columns) == store.SCHEMA.names


def test_rows_of_parts_stand_beside_the_row_of_the_whole(tmp_path: Path) -> None:
    """One metric of one arm, for the whole and for two of its parts: nothing is folded together."""
    run = writer(tmp_path / "r1")
    run.append(
        Measurement("s", "c1", "a", "{}", "amax", "ok", part=part, samples=(1.0, 3.0, 2.0), rounds=(0, 5, 10))
        for part in ("", "layers.0:input", "layers.0:weight")
    )
    frame = store.read(tmp_path)
    assert frame["part"].tolist() == ["", "layers.0:input", "layers.0:weight"]
    assert frame["value"].tolist() == [2.0] * 3
    assert frame["rounds"].map(list).tolist() == [[0, 5, 10]] * 3


def test_rows_of_a_newer_schema_are_read_with_a_warning(tmp_path: Path) -> None:
    pq.write_table(pa.table({"schema_version": [99], "case_id": ["c1"]}), tmp_path / "part-new.parquet")
    with pytest.warns(RuntimeWarning, match="schema_version 99"):
        assert len(store.read(tmp_path)) == 1


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"cannot write to .*results_dir="):
        writer(tmp_path / "file" / "r1")


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        store.read(tmp_path / "nowhere")


def test_an_empty_folder_reads_as_an_empty_frame(tmp_path: Path) -> None:
    assert list(store.read(tmp_path).columns) == store.SCHEMA.names


def test_a_damaged_run_json_does_not_lose_the_rows(tmp_path: Path) -> None:
    run = writer(tmp_path / "r1")
    run.append(rows("c1"))
    (tmp_path / "r1" / "run.json").write_text("{")
    assert store.read_about(tmp_path / "r1") == {}
    assert len(store.read(tmp_path / "r1")) == 1


def test_a_run_is_found_by_its_id_or_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "w" / "r1"
    writer(folder)
    assert store.find_run("r1", tmp_path) == folder
    assert store.find_run(str(folder), tmp_path) == folder
    with pytest.raises(UsageError, match=r"no run 'r2'.*newest: r1"):
        store.find_run("r2", tmp_path)


def test_run_ids_sort_by_time_and_name_the_commit() -> None:
    made = store.new_run_id("abcdef0123456789")
    assert made.split("-")[1] == "abcdef0"
    assert store.new_run_id(None).split("-")[1] == "nogit"
    assert len({store.new_run_id("a") for _ in range(50)}) == 50


def test_run_json_says_what_was_asked(tmp_path: Path) -> None:
    writer(tmp_path / "r1", about={"command": "python -m harness sweep=w"})
    about = json.loads((tmp_path / "r1" / "run.json").read_text())
    assert about["command"] == "python -m harness sweep=w"
    assert about["state"] == "running"


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (pa.table({"a": [1]}), "holds no rows of this store"),
        (pa.table({"schema_version": [1], "rounds": ["not a list"]}), "rounds|list|cast|convert"),
        (pa.table({"schema_version": [1]}).replace_schema_metadata({"harness.replaces": "{"}), "Expecting"),
    ],
)
def test_a_parquet_file_that_is_not_ours_is_named_and_the_others_are_read(
    table: pa.Table, why: str, tmp_path: Path
) -> None:
    writer(tmp_path / "r1").append(rows("c1"))
    pq.write_table(table, tmp_path / "r1" / "odd.parquet")
    with pytest.warns(RuntimeWarning, match=f"odd.parquet.*({why})"):
        assert store.read(tmp_path)["case_id"].tolist() == ["c1"]


def test_a_dangling_link_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    writer(tmp_path / "r1").append(rows("c1"))
    (tmp_path / "r1" / "part-gone.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.warns(RuntimeWarning, match=r"part-gone.parquet"):
        assert store.read(tmp_path)["case_id"].tolist() == ["c1"]


def test_rows_are_found_while_the_run_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts vanish between listing and reading, since compaction has just replaced them."""
    run = writer(tmp_path / "r1")
    run.append(rows("c1"))
    run.append(rows("c2"))
    real, closed = store._read_part, []

    def read_part(path: Path) -> Any:
        if not closed:
            closed.append(True)
            run.close("finished")
        return real(path)

    monkeypatch.setattr(store, "_read_part", read_part)
    assert sorted(store.read(tmp_path)["case_id"]) == ["c1", "c2"]


def test_a_frame_can_be_written_back(tmp_path: Path) -> None:
    writer(tmp_path / "r1").append(rows("c1"))
    frame = store.read(tmp_path)
    frame.to_parquet(tmp_path / "copy.parquet")
    assert len(store.read(tmp_path / "copy.parquet")) == 1
