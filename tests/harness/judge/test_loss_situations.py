"""The judge of loss curves on what is planted. Oracle: `loss_situations`, which no judge wrote."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from loss_situations import PASS, TABLE, Situation

import harness
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from harness.judge.verdict.rule import CurveVerdict

PLANTED = [name for name, situation in TABLE.items() if situation.words != PASS]
HONEST = [name for name in TABLE if name not in PLANTED]
DRAWS = 10
PAGE = Path(__file__).parents[3] / "reports" / "published" / "studies" / "loss-situations.md"
HEAD = """# Planted loss curves and their words

Made by `python tests/harness/judge/test_loss_situations.py`. {planted} planted situations must not PASS, {honest} honest twins must. Their
arms are invented: a loss that falls from 4 to 2.25 nats, runs 0.07 % apart. Other draws of each are judged by the slow test beside it.

| situation | word | codes |
| --- | --- | --- |
"""


def judged(situation: Situation, draw: int = 0) -> CurveVerdict | None:
    """None: a usage error."""
    base, candidate = situation.arms(draw)
    try:
        return harness.verdict(base, candidate, **situation.options)
    except UsageError:
        return None


@pytest.mark.parametrize("name", TABLE)
def test_the_word_is_right_and_the_finding_is_named(name: str) -> None:
    situation = TABLE[name]
    found = judged(situation)
    assert (found.outcome if found else "REFUSED") in situation.words, found and found.lines()
    assert not situation.code or (found is not None and situation.code in found.codes), found and found.codes


@pytest.mark.parametrize("name", [name for name in TABLE if TABLE[name].is_refused])
def test_what_is_refused_has_no_number(name: str) -> None:
    found = judged(TABLE[name])
    if found is not None:
        assert np.isnan([found.gap, found.low, found.high, found.p]).all(), found.lines()


def test_the_table_holds_what_was_asked_for_and_draws_again_what_it_drew() -> None:
    kinds = Counter(TABLE[name].kind for name in PLANTED)
    assert kinds.total() - kinds["paired"] >= 75
    assert kinds["paired"] >= 12
    assert len(HONEST) >= 20
    for situation in TABLE.values():
        first, again, other = (situation.arms(draw)[0] for draw in (1, 1, 2))
        assert all(a.equals(b) for a, b in zip(first, again, strict=True))
        assert not all(a.equals(b) for a, b in zip(first, other, strict=True))


def page() -> str:
    """The first draw of every situation: what was planted, the word, and why."""
    rows = []
    for name in sorted(TABLE, key=lambda name: (TABLE[name].kind, name)):
        found = judged(TABLE[name])
        word, codes = ("refused", "usage error") if found is None else (found.outcome, ", ".join(found.codes))
        rows.append(f"| {name} | {word} | {codes} |")
    return HEAD.format(planted=len(PLANTED), honest=len(HONEST)) + "\n".join(rows) + "\n"


@pytest.mark.slow
def test_the_page_is_that_of_the_situations() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 11, 21])
def test_other_draws_of_each_kind(first: int) -> None:
    """At most 1 % of planted situations pass, at least 95 % of the honest ones."""
    passed = Counter(
        name
        for name, situation in TABLE.items()
        for draw in range(first, first + DRAWS)
        if (found := judged(situation, draw)) and found.outcome == "PASS"
    )
    for names, low, high in ((PLANTED, 0, 0.01), (HONEST, 0.95, 1)):
        counts = {name: passed[name] for name in names}
        assert low <= sum(counts.values()) / DRAWS / len(names) <= high, counts


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
