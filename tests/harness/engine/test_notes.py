"""Oracles: arithmetic on notes made up here, and a run's own note while it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.engine.runlog import ProgressNote, notes, progress
from harness.machine.processes import began, this_host
from harness.store.run_files import PROGRESS


def note(folder: Path, **more: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"pid": os.getpid(), "began": began(os.getpid()), "host": this_host(), "written": 1100.0}
    (folder / PROGRESS).write_text(
        json.dumps(about | {"state": "running", "total": 10, "share": 0.25} | more)
    )


def test_how_far_shards_are_together() -> None:
    fast, slow = (
        ProgressNote("running", 10, 0.5, "", 1100.0),
        ProgressNote("running", 30, 0.25, "cast base", 1100.0),
    )
    assert progress([fast, slow], 1100.0) == "running, 31 % of 40 done; cast base"
    assert progress([ProgressNote("running", 1000, 0.998, "", 0.0)], 0.0) == "running, 99 % of 1000 done"
    assert "last sign of life 0:05:00 ago" in progress([fast], 1400.0)
    assert progress([ProgressNote("finished", 10, 1.0, "", 0.0)], 0.0) == ""
    assert progress([], 0.0) == ""


@pytest.mark.parametrize(
    ("host", "now", "state"),
    [
        (this_host(), 42, "running"),
        (this_host(), 43, "gone"),  # another process has its number
        (this_host(), None, "gone"),
        ("elsewhere", None, "running"),
    ],
)
def test_a_process_of_this_host_that_is_gone_is_told_from_one_elsewhere(
    host: str, now: int | None, state: str, tmp_path: Path
) -> None:
    note(tmp_path, host=host, began=42)
    (found,) = notes(tmp_path, lambda pid: now)
    assert found.state == state
    assert progress([found], 1100.0).partition(",")[0].partition(":")[0] == state
