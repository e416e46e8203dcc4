"""Copies, several writers of one run, older and newer files. Oracle: what was appended."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_rows import closed_run, rows, writer

from harness import store
from harness.store import parquet, reading
from harness.store.errors import UsageError
from harness.store.measurement import Measurement


def test_a_run_that_was_copied_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below one folder, by a relative and an absolute path, and both with all attempts."""
    folder = closed_run(tmp_path / "results" / "r1")
    shutil.copytree(folder, tmp_path / "results" / "from-node7" / "r1")
    monkeypatch.chdir(tmp_path)
    ways: list[list[str | Path]] = [["results"], ["results/r1", folder], ["results", folder / ".." / "r1"]]
    for paths in ways:
        for every in (False, True):
            frame = store.read(paths, all_attempts=every)
            assert sorted(frame["case_id"]) == ["c1", "c2"]
            assert len(frame.attrs["files"]) == 1


def test_a_run_that_was_copied_while_it_lasted_and_again_later_counts_once(tmp_path: Path) -> None:
    run = writer(tmp_path / "r1")
    run.append(rows("c1"))
    run.append(rows("c2"))
    shutil.copytree(tmp_path / "r1", tmp_path / "early" / "r1")
    run.append(rows("c3"))
    run.close("finished")
    assert sorted(store.read(tmp_path, all_attempts=True)["case_id"]) == ["c1", "c2", "c3"]


def test_a_copy_that_is_damaged_costs_nothing(tmp_path: Path) -> None:
    folder = closed_run(tmp_path / "b")
    shutil.copytree(folder, tmp_path / "a")
    (damaged,) = (tmp_path / "a").glob("*.parquet")
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.warns(RuntimeWarning, match=damaged.name):
        assert sorted(store.read(tmp_path)["case_id"]) == ["c1", "c2"]


def test_files_of_one_name_that_people_gave_are_different_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        store.read(closed_run(tmp_path / "made" / name)).to_parquet(tmp_path / name / "kernels.parquet")
    shutil.rmtree(tmp_path / "made")
    assert set(store.read(tmp_path)["run_id"]) == {"one", "two"}


@pytest.mark.parametrize("fault", [KeyboardInterrupt, PermissionError])
@pytest.mark.parametrize("at", range(3))
def test_a_compaction_that_is_cut_short_counts_no_row_twice(
    at: int, fault: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C or a disk that refuses, after the rename or before the first or second removal; closing compacts again."""
    run, events = writer(tmp_path / "r1"), itertools.count()
    for i in range(3):
        run.append(rows(f"c{i}"))
    rename, unlink = Path.replace, Path.unlink

    def happens() -> None:
        if next(events) == at:
            raise fault

    def replace(self: Path, target: Path) -> Path:
        done = rename(self, target)
        if target.name.startswith("rows-"):
            happens()
        return done

    def remove(self: Path, missing_ok: bool = False) -> None:
        if self.match("part-*.parquet"):
            happens()
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(Path, "unlink", remove)
    with suppress(fault):
        run._compact()
    run.append(rows("c3"))
    run.close("interrupted")
    assert next(events) > at
    if fault is KeyboardInterrupt:
        assert len(list(tmp_path.glob("r1/part-*"))) == (0 if at == 0 else 1)  # the one that came after
    for every in (False, True):
        assert sorted(store.read(tmp_path, all_attempts=every)["case_id"]) == ["c0", "c1", "c2", "c3"]


def test_two_compactions_of_the_same_parts_count_once(tmp_path: Path) -> None:
    """An earlier version gave the second file another name and left both."""
    (whole,) = closed_run(tmp_path / "r1").glob("*.parquet")
    shutil.copy(whole, whole.with_name(f"rows-{time.time_ns():020d}-abcdef.parquet"))
    assert len(store.read(tmp_path, all_attempts=True)) == 2


def test_two_writers_with_one_process_number_write_run_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers on one folder: the second writes its own while the first is about to rename."""
    rename, others = Path.replace, [tmp_path]

    def replace(self: Path, target: Path) -> Path:
        if others and target.name == "_run.json":
            writer(others.pop())
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    writer(tmp_path)
    assert not others
    assert store.read_about(tmp_path)["state"] == "running"
    assert not list(tmp_path.glob("*.tmp"))


def test_a_duplicate_shard_counts_once(tmp_path: Path) -> None:
    """The same cases, measured by two writers of one run in two folders that are then copied together."""
    for name, value in (("shard", 1.0), ("again", 2.0)):
        writer(tmp_path / name / "r1", run_id="r1").append(rows("c1", value) + rows("c1", value, arm="b"))
    assert store.read(tmp_path)["value"].tolist() == [2.0, 2.0]


def test_a_long_run_is_gathered_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "GATHERED", 4)
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
    assert list(frame.columns) == [*store.SCHEMA.names, "case_axes"]


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


def test_an_empty_folder_reads_as_an_empty_frame(tmp_path: Path) -> None:
    assert list(store.read(tmp_path).columns) == [*store.SCHEMA.names, "case_axes"]


def test_a_damaged_run_json_does_not_lose_the_rows(tmp_path: Path) -> None:
    run = writer(tmp_path / "r1")
    run.append(rows("c1"))
    (tmp_path / "r1" / "_run.json").write_text("{")
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
    about = json.loads((tmp_path / "r1" / "_run.json").read_text())
    assert about["command"] == "python -m harness sweep=w"
    assert about["state"] == "running"


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (pa.table({"a": [1]}), "has no rows of this store"),
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
    real, closed = reading.read_part, []

    def read_part(path: Path, *args: Any) -> Any:
        if not closed:
            closed.append(True)
            run.close("finished")
        return real(path, *args)

    monkeypatch.setattr(reading, "read_part", read_part)
    assert sorted(store.read(tmp_path)["case_id"]) == ["c1", "c2"]


def test_a_frame_can_be_written_back(tmp_path: Path) -> None:
    writer(tmp_path / "r1").append(rows("c1"))
    frame = store.read(tmp_path)
    frame.to_parquet(tmp_path / "copy.parquet")
    assert len(store.read(tmp_path / "copy.parquet")) == 1
