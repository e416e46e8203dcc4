"""The ledger of public runs. Oracle: the published page."""

from __future__ import annotations

import csv

import evidence
from documented_table import documented


def test_the_ledger_is_what_the_rule_says() -> None:
    lines = evidence.ledger()
    assert documented(evidence.PAGE, "ledger") == evidence.markdown(lines).splitlines()
    with evidence.LEDGER.open(newline="") as file:
        assert list(csv.DictReader(file)) == lines


def test_single_pairs_are_never_decided() -> None:
    single = [line for line in evidence.ledger() if line["runs"] == "1 + 1"]
    assert len(single) == 5
    assert {line["verdict"] for line in single} == {"INCONCLUSIVE"}
