"""Oracle: noise whose size is known, the rules as other gates document them, and the gate's promises on a part of the grid."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import gate_error_rates as study
import numpy as np
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


@pytest.mark.parametrize("mode", study.MODES)
def test_where_the_noise_of_a_process_and_of_a_sitting_goes(mode: str) -> None:
    """2 % a process: in every round of a stored unit alike, and anew in each round else; a shared sitting cancels."""
    random = np.random.default_rng(0)
    logs = study.log_ratios(study.sample(mode, study.Noise("p", sample=1e-6, process=0.02), 400, 8, random))
    within, between = logs.std(axis=1, ddof=1).mean(), logs.mean(axis=1).std()
    size = 0.02 * math.sqrt(2)
    expected = (0.0, size) if mode == "stored" else (size, size / math.sqrt(8))
    assert (within, between) == pytest.approx(expected, rel=0.15, abs=1e-5)
    sitting = study.Noise("s", sample=1e-6, process=0.0, session=0.05)
    shift = abs(study.log_ratios(study.sample(mode, sitting, 3, 8, random)).mean())
    assert shift < 1e-5 if mode == "paired" else shift > 0.001


@pytest.mark.parametrize("noise", study.NOISES, ids=lambda n: n.name)
def test_equal_sides_have_ratios_around_one(noise: study.Noise) -> None:
    means = study.log_ratios(study.times_of(noise, 8, 400, np.random.default_rng(1))).mean(axis=1)
    assert abs(means.mean()) < 5 * means.std() / math.sqrt(means.size)


@pytest.mark.parametrize(
    ("rule", "below", "above"),
    [
        (study.pytest_benchmark, 1.01, 1.15),
        (study.asv, 1.08, 1.12),
        (study.perfgate_paired, 0.99, 1.02),
        (lambda t: study.stackgate(t, np.random.default_rng(0)), 1.01, 1.05),
    ],
)
def test_each_rule_decides_where_its_documentation_says(rule, below: float, above: float) -> None:
    for factor, slower in ((below, False), (above, True)):
        times = np.exp(np.random.default_rng(0).normal(0, 0.01, (4, 8, 2, 20)))
        times[0, :, 1] *= factor
        assert rule(times)[0] == slower


def test_the_promises_hold_and_a_blind_gate_breaks_them(tmp_path) -> None:
    """A hundred trials bound a rate to 3 standard deviations; the study itself runs the whole grid."""
    noises = [study.NOISES[0], study.NOISES[6], study.NOISES[7]]
    cells = study.grid(POLICY, 100, noises=noises, rounds=(10,))
    found = study.rates(POLICY, 3, noises=noises[::2])
    kept = [*study.promises(cells), *study.rate_promises(found)]
    assert len(kept) == 6 + 9
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
