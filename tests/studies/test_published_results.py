"""One number for one question: every measured speedup that a page states. Oracle: the paired ratios of the published rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documented_table import documented
from published_results import PAGES, ROOT, tables

from harness.advise.command import answer, parse
from harness.advise.views import AdviceView
from harness.judge.verdict import time_to_loss
from harness.report.first_screen import FirstScreen
from harness.report.runs import load
from harness.report.standings import standings
from harness.report.verdicts import by_arm
from harness.store import text
from harness.store.case import OTHER

RATIO = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?x)(?: \((\d+\.\d+) to (\d+\.\d+))?(?!\w)")
TAG = re.compile(r"<(script|style|svg)\b.*?</\1>|<[^>]*>", re.DOTALL)
STATED = [
    *ROOT.glob("*.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / "results" / "README.md", ROOT / "reports" / "README.md"),
    *(ROOT / "reports" / "published" / name for name in ("mfu.md", "mfu.html")),
]
PREDICTED = "advise.md"  # what its examples print is predicted, and is compared with the command elsewhere


@pytest.fixture(scope="module")
def record() -> dict[str, set[tuple[str, str]]]:
    """Intervals with which each ratio of the published rows, as it is written, may stand."""
    found: dict[str, set[tuple[str, str]]] = {}
    for machine in load([ROOT / "results" / "published"], ROOT).machines:
        pairs = [*machine.every_pair, *machine.pairs]
        for pair in pairs:
            ends = (text.number(pair["low"]), text.number(pair["high"]))
            found.setdefault(text.ratio(pair["speedup"]), set()).add(ends)
        several = [gain for *_, gain, _ in by_arm(machine.pairs)] + [s.gain for s in standings(machine)]
        for suite in machine.suites:
            several += [gain for _, gain, _ in by_arm(p for p in machine.pairs if p["suite"] == suite)]
        for gain in several:
            found.setdefault(text.ratio(gain), set())
        for theirs in (
            found_of.theirs for found_of in machine.reproductions.values()
        ):  # of the authors of a peer
            for ratio in (theirs.low, theirs.high):
                found.setdefault(text.ratio(ratio), set())
        for setup in machine.trainings:  # steps until a loss is reached, over the control's
            arms = {arm: runs for arm, runs in setup.arms.items() if arm != f"base_{OTHER}"}
            for reach in time_to_loss(arms):
                if ratio := reach.step_ratio:
                    ends = (text.number(1 / ratio.high), text.number(1 / ratio.low))
                    found.setdefault(text.ratio(ratio.speedup), set()).add(ends)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_pages_say_of_published_rows_is_written_by_the_study(page: Path) -> None:
    marks = [name for name in tables() if f"<!-- {name} -->" in page.read_text()]
    assert marks
    for name in marks:
        assert documented(page, name) == tables()[name].splitlines()


@pytest.mark.parametrize("page", STATED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_speedup_on_a_page_is_one_of_the_record(
    page: Path, record: dict[str, set[tuple[str, str]]]
) -> None:
    if page.name == PREDICTED:
        return
    for ratio, *ends in RATIO.findall(TAG.sub(" ", page.read_text())):
        assert ratio in record, f"{ratio} is no ratio of the published rows"
        if any(ends):
            assert tuple(ends) in record[ratio], f"{ratio} has other intervals: {record[ratio]}"


def test_measured_ratios_beside_predictions_are_those_of_the_record(
    record: dict[str, set[tuple[str, str]]],
) -> None:
    """The last column of docs/advise-accuracy.md has four digits."""
    page = (ROOT / "docs" / "advise-accuracy.md").read_text()
    rows = re.findall(r"^\| (?:eager|compile) \|.*\| (\d\.\d+ \(.*) \|$", page, re.MULTILINE)
    cells = [each for row in rows for each in re.findall(r"(\d\.\d{3}) \((\d\.\d+) to (\d\.\d+)\)", row)]
    assert len(cells) == 3
    for ratio, *ends in cells:
        assert tuple(ends) in record[text.ratio(float(ratio))]


def test_speedups_in_json_are_those_of_the_record(record: dict[str, set[tuple[str, str]]]) -> None:
    """The first screen, and the measurements that an advice compares itself with."""
    runs = ROOT / "results" / "published" / "h200"
    advised = answer(parse(["model=llama3_8b", "gpu=h200", "seq=8192", "batch=2", f"runs={runs}"]))
    checks = AdviceView(advised).data()["checks"]
    told = [check["measured"] for check in checks if check["what"] != "product"]  # of which it is ms
    gpus = [machine for machine in load([runs], ROOT).machines if machine.is_gpu]
    told += [FirstScreen.of(machine).data()["speedup"] for machine in gpus]
    assert len(told) > 3
    assert [value for value in told if text.ratio(value) not in record] == []


def test_every_page_of_the_root_is_read() -> None:
    assert {"README.md", "PACKAGE.md", "CHANGELOG.md"} <= {
        page.name for page in STATED if page.parent == ROOT
    }


@pytest.mark.parametrize("planted", ["1.44x", "1.42x (1.40 to 1.43"])
def test_another_number_is_seen(planted: str, record: dict[str, set[tuple[str, str]]]) -> None:
    ((ratio, *ends),) = RATIO.findall(planted)
    assert ratio not in record or tuple(ends) not in record[ratio]
