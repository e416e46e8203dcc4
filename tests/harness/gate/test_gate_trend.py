"""Oracle: runs with known values; a page that loads nothing and lets no name out of its cell."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from gate_fixtures import ENV, time_row, value_row, write

from harness.__main__ import main
from harness.gate.trend import lines_of, write_trend
from harness.store.errors import UsageError


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Five runs that creep by 2 % each, and one elsewhere."""
    folders = []
    for index in range(5):
        rows = [time_row(1, [1.02**index] * 3), value_row(1, "rel_err_max", 0.1), value_row(1, "amax", 1.0)]
        folders.append(write(tmp_path / f"r{index}", rows, session=""))
    other = {**ENV, "gpu": "<b>GPU</b>"}
    return [*folders, write(tmp_path / "other", [time_row(1, [9.0] * 3)], env=other, session="")]


def test_what_creeps_in_over_many_changes_is_seen(runs: list[Path]) -> None:
    """Each change of 2 % is within the tolerance of 3 %; the five together are not."""
    lines = lines_of(runs)
    crept = next(line for line in lines if len(line.points) == 5 and line.unit == "ms")
    assert [p.value for p in crept.points] == pytest.approx([1.02**i for i in range(5)])
    assert crept.crept == pytest.approx(1.02**4 - 1)
    assert {line.unit for line in lines} == {"ms", "1"}  # amax is neither good nor bad


def test_environments_are_never_joined(runs: list[Path]) -> None:
    assert sorted(len(line.points) for line in lines_of(runs) if line.unit == "ms") == [1, 5]


@pytest.mark.parametrize(("better", "values", "crept"), [("higher", (10, 12, 9), 0.25), ("lower", (10, 8, 9), 0.125),
                                                         ("lower", (1,), 0.0), ("lower", (0, 1), 0.0)])  # fmt: skip
def test_worse_than_the_best(runs: list[Path], better: str, values: tuple[float, ...], crept: float) -> None:
    line = lines_of(runs)[0]
    points = tuple(dataclasses.replace(line.points[0], value=float(v)) for v in values)
    assert dataclasses.replace(line, better=better, points=points).crept == pytest.approx(crept)


def test_the_page_is_one_file_that_loads_nothing(runs: list[Path], tmp_path: Path) -> None:
    page = write_trend(runs, tmp_path / "out" / "trend.html").read_text()
    assert "<b>GPU</b>" not in page
    assert "&lt;b&gt;GPU&lt;/b&gt;" in page
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=|https?://|url\(", page)
    assert page.count("<circle") == 5 + 1  # rel_err_max was the same in all five runs
    assert "1 of 2 units had the same value in every run" in page
    assert "1 of 2 units had the same value in every run" in (tmp_path / "out" / "trend.md").read_text()
    assert 'class="n crept">+8.2%' in page
    assert "+8.2%" in (tmp_path / "out" / "trend.md").read_text()


def test_a_figure_is_drawn_and_a_curve_over_training_steps_is_not(tmp_path: Path) -> None:
    """sqnr_db is both: one figure of a cast, and a series of a training run."""
    curve = dataclasses.replace(value_row(2, "sqnr_db", 30.0), samples=(30.0, 29.0), rounds=(0, 50))
    run = write(tmp_path / "r", [value_row(1, "sqnr_db", 28.5), curve], session="")
    assert [[p.value for p in line.points] for line in lines_of([run])] == [[28.5]]


def test_the_command(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "t.html"
    assert main(["gate", "--history", *map(str, runs), "-o", str(target)]) == 0
    assert capsys.readouterr().out.split() == ["trend", str(target)]
    assert main(["gate", "--history", "nothing-here", "-o", str(target)]) == 2
    assert "no run 'nothing-here'" in capsys.readouterr().err


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    run = write(tmp_path / "r", [value_row(1, "amax", 1.0)], session="")
    with pytest.raises(UsageError, match="nothing to draw"):
        write_trend([run], tmp_path / "t.html")
    with pytest.raises(UsageError, match=r"must be named \*.html"):
        write_trend([run], tmp_path / "t.txt")
