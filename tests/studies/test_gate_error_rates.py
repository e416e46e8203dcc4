"""Oracle: noise whose size is known, the rules as other gates document them, and the gate's promises on a part of the grid."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import gate_error_rates as study
import pytest
import scipy.stats
from documented_table import documented

from harness.gate.policy import load_policy

POLICY = load_policy()


def test_the_rounds_that_the_documentation_promises() -> None:
    """Oracle: scipy's noncentral t. The least number in which p <= 0.01 / units, by Holm, has a probability of 95 %."""

    def rounds(units: int, spread: float) -> int:
        def power(n: int) -> float:
            line = scipy.stats.t.isf(0.01 / units, n - 1)
            return float(scipy.stats.nct.sf(line, n - 1, math.log1p(0.03) * math.sqrt(n) / spread))

        return next(n for n in itertools.count(8) if power(n) >= 0.95)

    page = (Path(__file__).parents[2] / "docs/gate-statistics.md").read_text()
    for units in (1, 8, 50, 200):
        row = " | ".join(str(rounds(units, spread)) for spread in (0.01, 0.02, 0.05))
        assert f"\n| {units} | {row} |\n" in page


def test_the_promises_hold_and_a_blind_gate_breaks_them(tmp_path) -> None:
    """A hundred trials bound a rate to 3 standard deviations; the study itself runs the whole grid."""
    noises = [study.NOISES[0], study.NOISES[6], study.NOISES[7]]
    cells = study.grid(POLICY, 100, noises=noises, rounds=(10,))
    found = study.rates(POLICY, 3, noises=noises[::2])
    kept = [*study.promises(cells), *study.rate_promises(found)]
    assert len(kept) == 7 + 9
    for promise in kept:
        slack = 3 * math.sqrt(promise.bound * (1 - promise.bound) / 100)
        bound = promise.bound + (-slack if promise.at_least else slack)
        assert replace(promise, bound=bound).holds, promise
    made = study.tables(cells, found, kept)
    page = tmp_path / "page.md"
    page.write_text(
        "".join(f"{name}:\n<!-- {name} -->\nold\n<!-- /{name} -->\nprose\n" for name in ("all", "few"))
    )
    study.fill(page, made)
    assert documented(page, "few") == made["few"].splitlines()
    assert (page.read_text().count("prose"), "old" in page.read_text()) == (2, False)
    blind = replace(POLICY, alpha_confirm=1e-12)
    assert [p.holds for p in study.promises(study.grid(blind, 100, noises=noises[1:2], rounds=(10,)))].count(
        False
    ) == 1
    loud = [replace(r, alarmed=1.0, passed=1.0) for r in found]
    assert not any(p.holds for p in study.rate_promises(loud))


@pytest.mark.slow
def test_an_interval_after_a_longer_first_stage_covers_as_often_as_promised() -> None:
    """Oracle: the truth that was planted. It was promised of the first stage, however long: 93 % of a 95 % interval."""
    bimodal = [noise for noise in study.NOISES if noise.name == "bimodal clock"]
    (cover,) = (
        p
        for p in study.promises(study.grid(POLICY, 1000, noises=bimodal, rounds=(6,)))
        if "more rounds" in p.text
    )
    assert cover.holds, cover
