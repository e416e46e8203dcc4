"""Run folders as other programs read them. Oracles: pandas and pyarrow.dataset, which know nothing of this store, and its own
`read`; a folder with the names of 2026-11 and before, written out by hand."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.dataset
import pytest

from harness import store
from harness.engine import run_folder, run_lock, runlog
from harness.store import run_files
from harness.store.errors import UsageError
from harness.store.measurement import Measurement

ROOT = Path(__file__).parents[3]


def measurement() -> Measurement:
    return Measurement("s", "c1", "a", "{}", "time_ms", "ok", samples=(1.0, 2.0))


def writer(folder: Path, run_id: str = "r1") -> runlog.LoggingWriter:
    return runlog.LoggingWriter(folder, run_id=run_id, sweep="toy", env_id="e", env={}, about={})


def rows_of(folder: Path) -> tuple[int, int]:
    """Rows as pandas and as pyarrow.dataset count them in a folder."""
    return len(pd.read_parquet(folder)), pyarrow.dataset.dataset(folder).count_rows()


def test_a_run_under_way_and_a_closed_one_read_as_plain_parquet(tmp_path: Path) -> None:
    """Lock, log, note and snapshots of a live run lie beside its parts; none of them stops a plain reader."""
    folder, second = tmp_path / "toy/r1", replace(measurement(), case_id="c2")
    with run_lock.held(folder), runlog.log_to(folder, logging.INFO):
        rows = writer(folder)
        runlog.ProgressFile(rows).write(state="running")
        rows.append([measurement()])
        rows.checkpoint([replace(second, status="partial", reason="cut off")])
        assert rows_of(folder) == (2, 2)
        rows.append([second])  # in the place of the snapshot
        assert rows_of(folder) == (2, 2)
        rows.close("finished")
    assert rows_of(folder) == (2, 2) == (len(store.read(folder)),) * 2
    assert {p.name for p in folder.iterdir() if p.suffix != ".parquet"} == {
        "_run.json",
        "_run.log",
        "_progress.json",
    }


def test_shards_of_a_run_read_as_one(tmp_path: Path) -> None:
    for index in (0, 1):
        shard = writer(tmp_path / f"r1/shard-{index}-of-2")
        shard.append([replace(measurement(), case_id=f"c{index}")])
        shard.close("finished")
    assert rows_of(tmp_path / "r1") == (2, 2)


@pytest.mark.parametrize(
    "run", sorted({p.parent for p in (ROOT / "results/published").rglob("*.parquet")}), ids=lambda p: p.name
)
def test_a_published_run_reads_as_plain_parquet(run: Path) -> None:
    assert rows_of(run) == (len(store.read(run, all_attempts=True)),) * 2


def test_the_lines_of_the_docs_give_an_axis_as_a_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of docs/store.md for pandas and for a file that any program reads; polars and duckdb are no dependency."""
    (block,) = re.findall(
        r"```python\n(import json\n.*?)```", (ROOT / "docs/store.md").read_text(), re.DOTALL
    )
    monkeypatch.chdir(ROOT)
    names: dict[str, pd.DataFrame] = {}
    exec(block.replace("rows.parquet", str(tmp_path / "rows.parquet")), names)
    expected = store.read("results/published/cpu/2026-11-21/quick", expand=True)
    assert names["plain"]["axes.M"].dropna().tolist() == expected["M"].dropna().tolist()
    assert (
        pd.read_parquet(tmp_path / "rows.parquet")["M"].dropna().tolist() == expected["M"].dropna().tolist()
    )


def test_a_plain_reader_sees_every_attempt(tmp_path: Path) -> None:
    """What docs/store.md says that `read` does beyond a plain reader."""
    for _ in range(2):
        rows = writer(tmp_path / "r1")
        rows.append([measurement()])
        rows.close("finished")
    assert rows_of(tmp_path / "r1") == (2, 2)
    assert len(store.read(tmp_path / "r1")) == 1


def older(folder: Path) -> Path:
    """A run as versions until November 2026 left it."""
    rows = writer(folder, "old")
    rows.append([measurement()])
    rows.close("interrupted")
    for name in ("run.json", "progress.json", "run.log"):
        (folder / f"_{name}").unlink(missing_ok=True)
    (folder / "run.json").write_text(
        json.dumps(
            {
                "run_id": "old",
                "sweep": "toy",
                "state": "interrupted",
                "command": "c",
                "started_at": "2026-01-01",
            }
        )
    )
    (folder / "progress.json").write_text('{"state": "interrupted"}')
    (folder / "run.log").write_text("before\n")
    return folder


def test_older_names_are_read(tmp_path: Path) -> None:
    folder = older(tmp_path / "toy/old")
    assert store.read_about(folder)["state"] == "interrupted"
    assert len(store.read(folder)) == 1
    assert run_files.existing(folder, run_files.PROGRESS) == folder / "progress.json"
    run_folder.refuse_stranger(folder)
    with pytest.raises(UsageError, match="newest: old"):
        store.find_run("none", tmp_path)


def test_a_continued_run_takes_new_names_and_loses_nothing(tmp_path: Path) -> None:
    folder = older(tmp_path / "toy/old")
    with run_lock.held(folder), runlog.log_to(folder, logging.INFO):
        logging.getLogger("harness").info("after")
        writer(folder, "old").close("finished")
    assert store.read_about(folder)["started_at"] == "2026-01-01"
    assert store.read_about(folder)["state"] == "finished"
    assert [line.split()[-1] for line in (folder / "_run.log").read_text().splitlines()] == [
        "before",
        "after",
    ]
    assert not [p for p in folder.iterdir() if not p.name.startswith("_") and p.suffix != ".parquet"]
    assert rows_of(folder) == (1, 1)


@pytest.mark.parametrize(("newer", "state"), [("run.json", "failed"), ("_run.json", "finished")])
def test_where_both_names_lie_the_newer_file_counts(tmp_path: Path, newer: str, state: str) -> None:
    """A copy of an older folder over a newer one leaves both names, and so does an older version that continues a run."""
    (tmp_path / "run.json").write_text('{"state": "failed"}')
    (tmp_path / "_run.json").write_text('{"state": "finished"}')
    for name in ("run.json", "_run.json"):
        os.utime(tmp_path / name, (1e9 + (name == newer),) * 2)
    assert store.read_about(tmp_path)["state"] == state
    assert list(run_files.below(tmp_path, run_files.ABOUT)) == [tmp_path / newer]
    run_files.rename_older(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_run.json", "_run.json.older"]
    assert store.read_about(tmp_path)["state"] == state


def test_checkpoints_beside_an_empty_new_folder_are_kept(tmp_path: Path) -> None:
    """What the new folder has stays, but for empty folders; nothing is removed."""
    old, new = tmp_path / "checkpoints", tmp_path / run_files.CHECKPOINTS
    for folder, names in ((old, ("a/1.pt", "b/1.pt", "c/1.pt")), (new, ("b/2.pt",))):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(folder.name)
    (new / "c").mkdir()
    run_files.rename_older(tmp_path)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pt")}
    assert files == {
        "_checkpoints/a/1.pt",
        "_checkpoints/b/2.pt",
        "_checkpoints/c/1.pt",
        "_checkpoints.older/b/1.pt",
    }
    assert not old.exists()
