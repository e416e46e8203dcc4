"""Pages that show a peer beside its authors' own figure. Oracles: the published rows of 2026-11-27, torchao's README."""

from __future__ import annotations

from pathlib import Path

import pytest
from published_results import by_run, sentence
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
    for part in ("0.859x", "16,384 tokens, 4 of 32", "1.06x to 1.10x", "4,096 tokens", "8 H100", "https://"):
        assert part in told


def test_an_arm_of_another_mode_than_its_authors_says_that_theirs_was_not_measured(h200) -> None:
    assert h200.reproductions["torchao_tensorwise_eager"].found == Found.NOT_MEASURED


def test_a_cpu_says_nothing_of_a_peer(cpu_machine) -> None:
    assert cpu_machine.reproductions == {}


def test_the_fastest_product_stands_beside_the_public_ones_on_both_sides() -> None:
    """Oracles: the published row of 1,506 TFLOP/s; ml-engineering's 1,453 on an H200 and 1,535 on a GH200 of 900 W, DeepGEMM's 1,500."""
    found = machine(DAY / "gemm")
    below, _, above = tables.best_product(found, "gemm").partition(" above it: ")
    assert "1,506 TFLOP/s" in below
    assert "isolated" in below
    assert below.index("1,500 (H800 SXM, https://") < below.index("1,453 (H200 SXM, ml-engineering")
    assert above.startswith("1,535 (GH200 144GB at 900 W, ml-engineering")
    assert above.count("1,535") == 1
    assert tables.best_product(found, "train") == ""
    assert "1,506 TFLOP/s" in tables.suite_table(found, "gemm").caption


def test_a_cpu_has_no_product_to_set_beside_them(cpu_machine) -> None:
    assert tables.best_product(cpu_machine, "gemm") == ""


def test_the_sentence_and_the_table_of_the_readmes_say_it_too(h200) -> None:
    words = h200.reproductions[ARM].words
    assert words in sentence(DAY)
    assert any(words in cell.note for row in by_run(DAY).rows for cell in row)
