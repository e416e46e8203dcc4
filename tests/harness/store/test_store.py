"""Oracle: what was appended; a later attempt replaces a whole case and nothing else."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from stored import row

from harness import store
from harness.engine import run_folder, runlog
from harness.store import parquet
from harness.store.errors import RETRYABLE, Cause, UsageError
from harness.store.measurement import Measurement


def rows(case: str, value: float = 1.0, arm: str = "a") -> list[Measurement]:
    return [row(case, arm, (value, value))]


def trial(
    case: str, arm: str, value: float = 1.0, reason: str = "", cause: Cause = Cause.NONE
) -> list[Measurement]:
    """A run of a trial suite, or why there is none."""
    return [row(case, arm, () if reason else (value,), "loss", reason=reason, cause=cause)]


def writer(folder: Path, **changes: Any) -> store.RunWriter:
    given: dict[str, Any] = {
        "run_id": folder.name,
        "sweep": "w",
        "env_id": "e1",
        "env": {"gpu": None},
        "about": {},
    }
    return store.RunWriter(folder, **(given | changes))


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
        return [row(case, arm, reason=more, cause=why) for arm in ("a", "b")]

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
        row("c1", "a", status="skipped", reason="spent", cause=Cause.BUDGET),
    )
    died = row("c1", "b", reason="twice", cause=Cause.DIED)
    writer(tmp_path / "r1").append([*done, died])
    writer(tmp_path / "r1").append([late, replace(late, arm="b")])
    assert store.read(tmp_path)["status"].tolist() == ["ok", "failed"]
    writer(tmp_path / "r1").append([*rows("c1", 2.0), replace(died, reason="again")])
    assert store.read(tmp_path)["value"].tolist()[0] == 2.0
    writer(tmp_path / "r1").append(rows("c1", 3.0) + rows("c1", 3.0, arm="b"))
    writer(tmp_path / "r1").append([late, replace(late, arm="b")])
    assert store.read(tmp_path)["value"].tolist() == [3.0, 3.0]


# JSON columns


NO_OBJECTS = [
    "{",
    "not json",
    "[1]",
    "3",
    "{" * 3000,
    '{"a":' * 100_000,
    '{"a":1}x',
    '{"a":' + "9" * 10_000 + "}",
]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *((column, text) for column in ("axes", "env") for text in NO_OBJECTS),
        *((name, None) for name in parquet.SCHEMA.names if name not in ("value", "bytes_moved")),
        ("resolved", '["x"]'), ("timing", "nan"), ("flops", '{"bf16":null}'), ("flops", '{"bf16":"many"}'),
        ("axes", '{"M":[1]}'), ("axes", '{"model":"' + "[" * 200_000 + '"}'), ("env", '{"gpu":{}}'),
        ("resolved", '{"tokens_per_step":["x"]}'), ("resolved", '{"memory":3}'),
        ("resolved", '{"fp8_gemms":3,"fp8_gemms_expected":null}'), ("arm_fields", '{"recipe":3}'),
        ("samples", [1.0]), ("samples", [1.0, None]), ("samples", [1.0, float("nan")]), ("samples", []),
        ("rounds", [0]), ("rounds", [0, 1, 2]),
        ("sample_clock_mhz", [1.0]), ("value", None), ("value", float("nan")), ("value", float("inf")), ("value", 0.0), ("status", "fine"),
        ("status", "failed"), ("better", "fine"),
    ],
)  # fmt: skip
def test_a_part_with_rows_that_no_harness_writes_is_left_out_and_named(
    column: str, value: Any, tmp_path: Path
) -> None:
    run = writer(tmp_path / "r1")
    run.append([replace(rows("c1")[0], rounds=(0, 1))])
    run.append(rows("c2"))
    part, _ = sorted((tmp_path / "r1").glob("part-*"))
    table = pq.read_table(part)
    place = table.schema.get_field_index(column)
    pq.write_table(table.set_column(place, column, pa.array([value], table.schema.types[place])), part)
    with pytest.warns(RuntimeWarning, match=part.name):
        frame = store.read(tmp_path, expand=True)
    assert frame["case_id"].tolist() == ["c2"]
    (problem,) = frame.attrs["problems"]
    assert problem.startswith(f"{part}: ")


@pytest.mark.parametrize("axes", ['{"model":"{broken"}', '{"model":"{\\"a\\":' + "[" * 2000 + '"}'])
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "report r1 -o out.html"), (2, "diff r1 r1"), (2, "fleet r1"), (2, "gate --baseline r1 --candidate r1"),
        (2, "export r1 -o out.csv"), (2, "advise model=nano gpu=h100_sxm runs=r1"),
    ],
)  # fmt: skip
def test_no_command_has_a_traceback_over_a_part_that_no_harness_wrote(
    code: int, words: str, axes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.__main__ import main

    monkeypatch.chdir(tmp_path)
    run = writer(tmp_path / "r1")
    run.append([replace(rows("c1")[0], axes=axes)])
    (tmp_path / "r1" / "part-x.parquet").symlink_to("part-x.parquet")
    run._constant["env"] = "{torn"
    run.append(rows("c2"))
    assert main(words.split()) == code


def test_a_long_run_is_gathered_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "GATHERED", 4)
    run = writer(tmp_path / "r1")
    for i in range(10):
        run.append(rows(f"c{i}", 1.0 + i))
        assert len(list((tmp_path / "r1").glob("part-*"))) < 4
    run.close("finished")
    assert len(list((tmp_path / "r1").glob("*.parquet"))) == 3
    assert sorted(store.read(tmp_path)["value"]) == [1.0 + i for i in range(10)]


def test_rows_of_another_device_say_so(tmp_path: Path) -> None:
    run = writer(tmp_path / "r1")
    run.append(rows("c1"))
    run.append(rows("c2"), ("e2", {"gpu": "other"}))
    frame = store.read(tmp_path).set_index("case_id")
    assert frame["env_id"].to_dict() == {"c1": "e1", "c2": "e2"}
    assert frame.loc["c2", "env"] == '{"gpu":"other"}'


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"cannot write to .*results_dir="):
        writer(tmp_path / "file" / "r1")


def rows_of(folder: Path) -> tuple[int, int]:
    """Rows as pandas and as pyarrow.dataset count them in a folder."""
    return len(pd.read_parquet(folder)), pyarrow.dataset.dataset(folder).count_rows()


SHARDS, PARTS, ROWS = 64, 20, 50  # of each shard: closed parts, rows in each


def write(folder: Path, shard: int, begin: multiprocessing.Barrier) -> None:  # type: ignore[valid-type]
    """One shard: its rows in parts, once all others are ready."""
    begin.wait(timeout=120)  # type: ignore[attr-defined]
    own = folder / f"shard-{shard}-of-{SHARDS}"
    run = store.RunWriter(
        own, run_id=folder.name, sweep="many", env_id="e1", env={"cpu": "one"}, about={"sweep": "many"}
    )
    for part in range(PARTS):
        run.append(
            Measurement(
                "gemm", f"{shard}-{part}-{row // 2}", ("bf16_eager", "rowwise_eager")[row % 2], f'{{"M":{row}}}', "time_ms",
                "ok", samples=(1.0 + shard, 1.0 + part, 1.0 + row), baseline="bf16_eager" if row % 2 else "",
            )
            for row in range(ROWS)
        )  # fmt: skip
    run.close("finished")


@pytest.mark.slow
def test_shards_that_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.store.parquet"])
    folder, begin = tmp_path / "results" / "many" / "r1", context.Barrier(SHARDS)
    writers = [context.Process(target=write, args=(folder, shard, begin)) for shard in range(SHARDS)]
    for one in writers:
        one.start()
    for one in writers:
        one.join(timeout=300)
    assert [one.exitcode for one in writers] == [0] * SHARDS
    frame = store.read(folder)
    assert len(frame) == SHARDS * PARTS * ROWS
    expected = {
        (f"{shard}-{part}-{row // 2}", ("bf16_eager", "rowwise_eager")[row % 2])
        for shard in range(SHARDS)
        for part in range(PARTS)
        for row in range(ROWS)
    }
    assert set(zip(frame["case_id"], frame["arm"], strict=True)) == expected
    of = frame["samples"].map(
        lambda drawn: f"{drawn[0] - 1:.0f}-{drawn[1] - 1:.0f}-{(drawn[2] - 1) // 2:.0f}"
    )
    assert (of == frame["case_id"]).all()
    assert not list(folder.rglob("*.tmp"))
    assert len(list(folder.rglob("*.parquet"))) == SHARDS  # each compacted its own


@pytest.mark.parametrize(
    "spoil",
    [
        *(lambda part, keep=keep: part.write_bytes(part.read_bytes()[:keep]) for keep in (0, 3, 200)),
        lambda part: pq.write_table(pa.table({"a": [1]}), part),
        lambda part: pq.write_table(pq.read_table(part).drop_columns(["value"]), part),
        lambda part: pq.write_table(
            pq.read_table(part).replace_schema_metadata({"harness.replaces": "{"}), part
        ),
        *(
            lambda part, names=names: pq.write_table(
                pq.read_table(part).replace_schema_metadata({"harness.replaces": names}), part
            )
            for names in ("3", "null", '{"a":1}', "[1]", "[" * 200_000)
        ),
        lambda part: (part.unlink(), os.mkfifo(part)),
        lambda part: (part.unlink(), part.symlink_to(part.name)),
        lambda part: (part.unlink(), part.mkdir()),
        lambda part: (part.unlink(), part.symlink_to("nowhere")),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_the_others_are_read(spoil: Any, tmp_path: Path) -> None:
    """A copy of the damaged one is as good as it."""
    run = writer(tmp_path / "r1")
    run.append(rows("c1"))
    run.append(rows("c2"))
    part = sorted((tmp_path / "r1").glob("part-*"))[1]
    copied = Path(shutil.copytree(tmp_path / "r1", tmp_path / "z" / "r1")) / part.name
    spoil(part)
    with pytest.warns(RuntimeWarning, match=part.name):
        frame = store.read(tmp_path)
    assert sorted(frame["case_id"]) == ["c1", "c2"]
    assert [problem.startswith(f"{part}: ") for problem in frame.attrs["problems"]] == [True]
    copied.unlink()
    with pytest.warns(RuntimeWarning, match=part.name):
        assert store.read(tmp_path)["case_id"].tolist() == ["c1"]


@pytest.mark.parametrize(
    ("first", "second", "ahead_s"),
    [
        ("", "", 0),
        ("", "", 3600),
        ("shard-0-of-2", "shard-0-of-3", 3600),
        ("shard-0-of-2", "shard-1-of-2", 3600),
        ("shard-0-of-2", "", 3600),
    ],
)
@pytest.mark.parametrize("ticks", [True, False])
def test_the_later_attempt_wins_whatever_the_clocks_say(
    first: str, second: str, ahead_s: int, ticks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts of one case and run: by a clock that was set back, that stands still, or lies ahead on another machine."""
    real, start = time.time_ns, time.time_ns()
    now = real if ticks else lambda: start
    monkeypatch.setattr(time, "time_ns", lambda: now() + ahead_s * 10**9)
    writer(tmp_path / "r1" / first, run_id="r1").append(rows("c1", 1.0))
    monkeypatch.setattr(time, "time_ns", now)
    for value in (2.0, 3.0):
        writer(tmp_path / "r1" / second, run_id="r1").append(rows("c1", value))
    assert store.read(tmp_path)["value"].tolist() == [3.0]
    assert len(store.read(tmp_path, all_attempts=True)) == 3


def test_two_writers_that_begin_at_once_have_attempts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one tick of the clock: what each adds to it is drawn. Neither touches the other's parts."""
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    one, two = (writer(tmp_path / "r1") for _ in range(2))
    for run, name in ((one, "one"), (two, "two")):
        run.append(rows("c1"))
        run.append(rows(name))
    one.close("finished")
    two.append(rows("late"))
    assert sorted(store.read(tmp_path)["case_id"]) == ["c1", "late", "one", "two"]


def test_a_run_under_way_and_a_closed_one_read_as_plain_parquet(tmp_path: Path) -> None:
    """Lock, log, note and snapshots of a live run lie beside its parts; none of them stops a plain reader."""
    folder = tmp_path / "toy" / "r1"
    shard = folder / "shard-0-of-2"
    (cut_off,) = rows("c2")
    with run_folder.held(shard), runlog.log_to(shard, logging.INFO):
        run = runlog.LoggingWriter(shard, run_id="r1", sweep="toy", env_id="e", env={}, about={})
        runlog.ProgressFile(run).write(state="running")
        run.append(rows("c1"))
        run.checkpoint([replace(cut_off, status="partial", reason="cut off")])
        assert rows_of(folder) == (2, 2)
        run.append([cut_off])  # in the place of the snapshot
        assert rows_of(folder) == (2, 2)
        run.close("finished")
    assert rows_of(folder) == (2, 2) == (len(store.read(folder)),) * 2
    assert {p.name for p in shard.iterdir() if p.suffix != ".parquet"} == {
        "_run.json",
        "_run.log",
        "_progress.json",
    }
