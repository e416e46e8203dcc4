"""Oracles: arithmetic on notes made up here, and a run's own note while it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from toy import ToySuite, offered

from harness.__main__ import main
from harness.engine.run_folder import newest_first
from harness.engine.runlog import Note, notes, progress
from harness.machine.processes import began, this_host
from harness.store import run_state
from harness.store.case import Case
from harness.store.run_files import ABOUT, PROGRESS
from harness.timing.workload import Workload


def note(folder: Path, **more: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"pid": os.getpid(), "began": began(os.getpid()), "host": this_host(), "written": 1100.0}
    (folder / PROGRESS).write_text(
        json.dumps(about | {"state": "running", "total": 10, "share": 0.25} | more)
    )


def test_how_far_shards_are_together() -> None:
    fast, slow = Note("running", 10, 0.5, "", 1100.0), Note("running", 30, 0.25, "cast base", 1100.0)
    assert progress([fast, slow], 1100.0) == "running, 31 % of 40 done; cast base"
    assert progress([Note("running", 1000, 0.998, "", 0.0)], 0.0) == "running, 99 % of 1000 done"
    assert "last sign of life 0:05:00 ago" in progress([fast], 1400.0)
    assert progress([Note("finished", 10, 1.0, "", 0.0)], 0.0) == ""
    assert progress([], 0.0) == ""


def test_the_latest_spread_of_a_run_counts(tmp_path: Path) -> None:
    assert notes(tmp_path) == []
    note(tmp_path / "shard-1-of-3")
    note(tmp_path / "shard-0-of-3", written=1000.0)
    note(tmp_path / "shard-0-of-2", written=900.0)
    note(tmp_path, written=900.0)  # of an earlier attempt that was whole
    assert [each.written for each in notes(tmp_path)] == [1000.0, 1100.0]
    note(tmp_path, written=2000.0, state="finished")  # resumed without shards
    assert [each.state for each in notes(tmp_path)] == ["finished"]


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


@pytest.mark.parametrize("text", ["{", "[]", '{"state": 1, "statuses": 3}'])
def test_a_damaged_note_is_no_note(text: str, tmp_path: Path) -> None:
    (tmp_path / PROGRESS).write_text(text)
    assert notes(tmp_path) == []


def test_a_run_can_be_listed_and_reported_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From within the second case: the note, `runs` and `report` all speak of one case of three."""
    toy, seen = offered([1, 2, 3], tmp_path, monkeypatch), list[str]()

    def look_around(case: Case) -> Workload:
        if case.integer("n") == 2:
            capsys.readouterr()
            assert main(["runs"]) == 0
            assert main(["report", "results/toy/r1", "-o", "now.html"]) == 0
            seen.append(capsys.readouterr().out)
        return ToySuite().build(case, "base", "cpu")

    toy.behaviour = {"base": look_around}
    assert main(["sweep=toy", "device=cpu", "run_id=r1"]) == 0
    (out,) = seen
    assert "running, 33 % of 3 done" in out
    assert "has not ended" in Path("now.md").read_text()
    assert "has not ended" not in Path("reports/r1.md").read_text()


def test_the_newest_of_many_runs_are_found_without_reading_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the order in which they began, also of one that was resumed last of all and of one that is no run."""
    for i in range(100):
        folder = tmp_path / "toy" / f"r{i:02}"
        folder.mkdir(parents=True)
        began_at = f"2026-01-{1 + i // 24:02}T{i % 24:02}:00:00+00:00"
        about = {"run_id": folder.name, "sweep": "toy", "state": "finished", "started_at": began_at}
        (folder / ABOUT).write_text(json.dumps({} if i == 98 else about))
        written = 1767225600 + 3600 * (i if i != 3 else 500) + 60  # 2026-01-01
        os.utime(folder / ABOUT, (written, written))
    read, about_of = list[str](), run_state.about
    monkeypatch.setattr(run_state, "about", lambda run: (read.append(run.name), about_of(run))[1])
    runs, older = newest_first(tmp_path, "**", 3)
    assert [run.name for run in runs] == ["r99", "r97", "r96"]
    assert older == 96, "r98 was looked at: it is no run"
    assert len(read) <= 7
