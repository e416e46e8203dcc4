"""The report of a sweep of several parts while it runs. Oracles: the rows stored by then, and the page after the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy import SWEEP, ToySuite, nothing

from harness import report
from harness.__main__ import main
from harness.cli import run
from harness.store.case import Case
from harness.store.errors import UsageError
from harness.timing.workload import Numerics, Workload

PARTS = """\
# Does the toy pay?
isolate: false
parts:
  one: {suite: toy, axes: {n: [1, 2]}}
  two: {suite: toy, axes: {n: [3]}}
"""
TIMING = SWEEP[SWEEP.index("timing:") :]


def test_the_report_is_written_after_each_part_and_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[str]] = {}
    pages: list[str] = []

    def look_around(case: Case) -> Workload:
        seen[case.integer("n")] = [path.name for path in Path("reports").glob("*")]
        pages.append(Path("reports/r1.md").read_text() if seen[case.integer("n")] else "")
        return Workload(
            run=nothing, check=lambda: Numerics({"sqnr_db": 28.5}), flops={"bf16": 1.0}, bytes_moved=2.0
        )

    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps/parted.yaml").write_text(PARTS + TIMING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(run.SUITES, "toy", ToySuite(behaviour={"base": look_around}))
    assert main(["sweep=parted", "device=cpu", "run_id=r1"]) == 0
    assert [sorted(seen[n]) for n in (1, 2, 3)] == [[], [], ["r1.html", "r1.md"]]
    assert "still running or was killed, after part 1 of 2 (one)" in pages[2]
    assert "throttled | 0 of 6 |" in pages[2], "rows of two cases: two arms, and the baseline again"
    ended = Path("reports/r1.md").read_text()
    assert "still running" not in ended
    assert "throttled | 0 of 9 |" in ended

    def refuse(self: Path, target: Any) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(UsageError, match="no space left"):
        report.write_report([Path("results/parted/r1")], Path("reports/r1.html"))
    assert Path("reports/r1.md").read_text() == ended, "a page that is open is whole"
    assert len(list(Path("reports").iterdir())) == 2
