"""Sections of single suites. Oracle: the room that writes their rows."""

from __future__ import annotations

from harness.engine.rows import REFUSES as OF_ROWS
from harness.report.parallel import REFUSES


def test_what_writes_the_rows_of_a_refusal_and_what_reads_them_agree():
    assert REFUSES == OF_ROWS
