"""Pages that show a peer beside its authors' own figure. Oracles: the published rows of 2026-11-27, torchao's README."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_pages import machine

from harness.judge.reproduced import Found
from harness.report import headline, tables
from harness.report.section import sections
from harness.report.standings import doubts

DAY = Path(__file__).parents[3] / "results/published/h200/2026-11-27"
ARM = "nocompile_tensorwise_eager"


@pytest.fixture(scope="module")
def h200():
    return machine(DAY / "eager", DAY / "nocompile")


def test_every_table_and_the_picture_say_that_a_peer_was_not_reproduced(h200) -> None:
    assert h200.reproductions[ARM].found == Found.NOT_REPRODUCED
    words, rows, about = h200.reproductions[ARM].words, headline.headline_rows(h200), tables.peers(h200)
    made = [headline.headline(h200, rows)]
    made += [t for section in sections(h200) for t in section.all_tables if t.key != about.key]
    named = [cell for table in made for row in table.rows for cell in row if cell.text == ARM]
    assert len(named) > 5
    assert all(words in cell.note for cell in named)
    assert words in doubts(h200, ARM)


def test_the_table_of_peers_has_shape_device_and_source_of_the_authors_figure(h200) -> None:
    assert all(isinstance(column.title, str) for column in tables.peers(h200).columns)
    (row,) = (row for row in tables.peers(h200).rows if row[0].text == ARM)
    told = " ".join(cell.text for cell in row)
    for part in ("0.859x", "16,384 tokens, 4 of 32", "1.06x to 1.10x", "4,096 tokens", "8 H100"):
        assert part in told
    assert row[-1].href == f"https://{row[-1].text}"


def test_an_arm_of_another_mode_than_its_authors_says_that_theirs_was_not_measured(h200) -> None:
    assert h200.reproductions["torchao_tensorwise_eager"].found == Found.NOT_MEASURED


def test_a_cpu_says_nothing_of_a_peer(cpu_machine) -> None:
    assert cpu_machine.reproductions == {}
