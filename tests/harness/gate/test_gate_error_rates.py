"""Oracle: scipy, the documented rules on times made for each, and noise whose rates are known."""

from __future__ import annotations

import dataclasses
import doctest
import math

import numpy as np
import pytest
import scipy.stats

from harness.gate import error_rates, peer_rules
from harness.gate.policy import load_policy
from harness.gate.simulate import NOISES, Noise

POLICY = load_policy()


def times(factor: float = 1.0, spread: float = 0.01, units: int = 4, seed: int = 0) -> np.ndarray:
    """[unit, round, side, sample]: 8 rounds of 20 independent samples; the first unit is slower."""
    out = np.exp(np.random.default_rng(seed).normal(0, spread, (units, 8, 2, 20)))
    out[0, :, 1] *= factor
    return out


def test_doctests() -> None:
    assert not doctest.testmod(peer_rules).failed


@pytest.mark.parametrize(
    ("rule", "below", "above"),
    [
        (peer_rules.pytest_benchmark, 1.01, 1.15),
        (peer_rules.asv, 1.08, 1.12),
        (peer_rules.perfgate_paired, 0.99, 1.02),
        (lambda t: peer_rules.stackgate(t, np.random.default_rng(0)), 1.01, 1.05),
        (lambda t: peer_rules.sign_flip(error_rates.log_ratios(t)[:1], np.empty((1, 0)), 0.03), 1.02, 1.05),
    ],
)
def test_each_rule_decides_where_its_documentation_says(rule, below: float, above: float) -> None:
    assert not rule(times(below))[0]
    assert rule(times(above))[0]


def test_the_rank_test_and_the_procedure_against_scipy() -> None:
    sides = np.random.default_rng(0).normal(0, 1, (5, 2, 30))
    expected = [scipy.stats.mannwhitneyu(b, a, method="asymptotic", use_continuity=False) for a, b in sides]
    z = peer_rules.rank_z(sides)
    assert 2 * scipy.stats.norm.sf(np.abs(z)) == pytest.approx([e.pvalue for e in expected])
    coarse = np.round(sides, 0)  # ten values or so, each many times
    expected = [scipy.stats.mannwhitneyu(b, a, method="asymptotic", use_continuity=False) for a, b in coarse]
    z = peer_rules.rank_z(coarse)
    assert 2 * scipy.stats.norm.sf(np.abs(z)) == pytest.approx([e.pvalue for e in expected])
    assert [x > 0 for x in z] == [e.statistic > 30 * 30 / 2 for e in expected]
    assert peer_rules.rank_z(np.ones((1, 2, 40))).tolist() == [0.0]
    p = np.random.default_rng(1).random(9)
    assert peer_rules.benjamini_hochberg(p) == pytest.approx(scipy.stats.false_discovery_control(p))


def test_the_sign_flip_of_many_units_finds_nothing_in_eight_rounds() -> None:
    """The fault that it had: 50 units ten times slower, and 2**-8 times 50 is above 0.01."""
    rounds = np.full((50, 8), math.log(10.0))
    assert not peer_rules.sign_flip(rounds, np.empty((50, 0)), 0.05).any()
    assert peer_rules.sign_flip(rounds[:1], np.empty((1, 0)), 0.05).all()


def test_there_are_eighteen_noises_of_different_names() -> None:
    assert len({n.name for n in NOISES}) == len(NOISES) == 18
    assert len({dataclasses.astuple(n)[1:] for n in NOISES}) == 18


@pytest.mark.parametrize("mode", error_rates.MODES)
def test_where_the_noise_of_a_process_goes(mode: error_rates.Mode) -> None:
    """2 % a process: in every round of a stored unit alike, and anew in each round else."""
    noise = Noise("p", sample=1e-6, process=0.02)
    logs = error_rates.log_ratios(error_rates.sample(mode, noise, 400, 8, np.random.default_rng(0)))
    within, between = logs.std(axis=1, ddof=1).mean(), logs.mean(axis=1).std()
    size = 0.02 * math.sqrt(2)
    expected = (0.0, size) if mode == "stored" else (size, size / math.sqrt(8))
    assert (within, between) == pytest.approx(expected, rel=0.15, abs=1e-5)


def test_a_sitting_of_its_own_shifts_both_sides_only_where_they_sat_together() -> None:
    noise = Noise("s", sample=1e-6, process=0.0, session=0.05)
    shift = {
        mode: abs(
            error_rates.log_ratios(error_rates.sample(mode, noise, 3, 8, np.random.default_rng(0))).mean()
        )
        for mode in error_rates.MODES
    }
    assert shift["paired"] < 1e-5
    assert min(shift["stored"], shift["imported"]) > 0.001


def test_the_promises_of_whole_judgements_hold() -> None:
    """The command's bars on a part of the grid; the command runs all of it."""
    found = error_rates.rates(POLICY, 4, 0, [NOISES[0], NOISES[2], NOISES[7]])
    bars = error_rates.rate_bars(found, error_rates.quiet_power(POLICY, 20))
    assert [b.holds for b in bars] == [True] * 10
    assert {(r.mode, r.units) for r in found} == {
        (mode, units) for mode in error_rates.MODES for units in (1, 4, 7, 50)
    }
    lines = error_rates.rate_lines(found, 4)
    assert sum(line.startswith("| noisy runner |") for line in lines) == 3
    assert sum(line.startswith(f"| {mode} | 7 |") for line in lines for mode in error_rates.MODES) == 3
    blind = [dataclasses.replace(r, alarmed=r.judgements, passed=1.0) for r in found]
    assert not any(b.holds for b in error_rates.rate_bars(blind, 0.5))
