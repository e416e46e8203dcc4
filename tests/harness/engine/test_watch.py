"""Oracles: arithmetic on notes made up here, and a run's own note while it runs and after."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from toy import ToySuite, offered

from harness.__main__ import main
from harness.engine.watch import Part, look, summary
from harness.machine.processes import began, this_host
from harness.store.case import Case
from harness.store.run_files import PROGRESS
from harness.timing.workload import Workload


def note(folder: Path, **more: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "pid": os.getpid(),
        "began": began(os.getpid()),
        "host": this_host(),
        "started": 1000.0,
        "written": 1100.0,
        "statuses": {"ok": 5},
    }
    (folder / PROGRESS).write_text(
        json.dumps(about | {"state": "running", "total": 10, "share": 0.25} | more)
    )


def test_the_time_left_follows_from_what_is_done() -> None:
    """A quarter in 100 s is 400 s in all, of which 350 are left 50 s later."""
    part = Part("", "running", 8, 0.25, "", 1000.0, 1100.0)
    assert part.left_s(1100.0) == 300.0
    assert part.left_s(1050.0) == 350.0
    assert part.left_s(9999.0) == 0.0
    assert Part("", "running", 8).left_s(1.0) is None
    assert Part("", "finished", 8, 1.0).left_s(1.0) == 0.0


def test_shards_take_as_long_as_the_slowest() -> None:
    fast = Part("0/2", "running", 10, 0.5, "", 1000.0, 1100.0, {"ok": 5})
    slow = Part("1/2", "running", 30, 0.25, "", 1000.0, 1100.0, {"ok": 7, "failed": 1})
    said = summary([fast, slow], 1100.0)
    assert said == "31 % of 40 done; 2 shards: 2 running; 0:05:00 left; 1 failed, 12 ok"
    assert summary([Part("", "running", 1000, 0.998)], 0.0).startswith("99 % of 1000 done")
    waiting = Part("2/3", "waiting")
    assert "at least 0:05:00 left" in summary([fast, slow, waiting], 1100.0)
    assert "20 done" in summary([fast, Part("1/2", "waiting")], 1100.0)


def test_the_shards_of_a_run_include_those_to_come(tmp_path: Path) -> None:
    assert look(tmp_path) == []
    note(tmp_path / "shard-1-of-3")
    assert [(p.name, p.state) for p in look(tmp_path)] == [
        ("0/3", "waiting"),
        ("1/3", "running"),
        ("2/3", "waiting"),
    ]
    note(tmp_path, written=900.0)  # of an earlier attempt that was whole
    assert len(look(tmp_path)) == 3
    note(tmp_path, written=2000.0, state="finished")  # resumed without shards
    assert [(p.name, p.state) for p in look(tmp_path)] == [("", "finished")]


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
    (part,) = look(tmp_path, lambda pid: now)
    assert part.state == state


@pytest.mark.parametrize("text", ["{", "[]", '{"state": 1, "statuses": 3}'])
def test_a_damaged_note_is_no_note(text: str, tmp_path: Path) -> None:
    (tmp_path / PROGRESS).write_text(text)
    assert look(tmp_path) == []


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToySuite:
    return offered([1, 2, 3], tmp_path, monkeypatch)


def test_a_run_can_be_watched_and_reported_while_it_runs(
    toy: ToySuite, capsys: pytest.CaptureFixture[str]
) -> None:
    """From within the second case: the note, `watch` and `report` all speak of one case of three."""
    seen: list[str] = []

    def look_around(case: Case) -> Workload:
        if case.integer("n") == 2:
            capsys.readouterr()
            assert main(["watch", "r1", "--once"]) == 0
            assert main(["report", "results/toy/r1", "-o", "now.html"]) == 0
            seen.append(capsys.readouterr().out)
        return ToySuite().build(case, "base", "cpu")

    toy.behaviour = {"base": look_around}
    assert main(["sweep=toy", "device=cpu", "run_id=r1"]) == 0
    (out,) = seen
    assert "33 % of 3 done" in out
    assert "running" in out
    assert "has not ended" in Path("now.md").read_text()
    assert "has not ended" not in Path("reports/r1.md").read_text()
    capsys.readouterr()
    assert main(["watch", "r1"]) == 0
    assert capsys.readouterr().out.startswith("100 % of 3 done; finished; ")
