"""Oracle: the gate's published promises (docs/gate.md), on a part of the grid; and noise whose size is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from harness.gate.decide import Verdict
from harness.gate.policy import load_policy
from harness.gate.simulate import EFFECTS, GRID, NOISES, TOLERANCE, Bar, Noise, bars, draw, grid

POLICY = load_policy()
TRIALS = 250


@pytest.fixture(scope="module")
def cells():
    return grid(POLICY, TRIALS, rounds=(10,))


def test_the_promises_hold(cells) -> None:
    """A quarter of a thousand trials bound a rate to 3 points; the command runs 2000 and more rounds."""
    for bar in bars(cells):
        slack = 3 * np.sqrt(bar.bound * (1 - bar.bound) / TRIALS)
        slack *= -1 if bar.at_least else 1
        assert dataclasses.replace(bar, bound=bar.bound + slack).holds, bar


def test_every_noise_and_effect_is_there(cells) -> None:
    assert [(c.noise, c.effect) for c in cells] == [(n.name, e) for n in GRID for e in EFFECTS]
    assert all(sum(c.verdicts.values()) == TRIALS for c in cells)


def test_detection_grows_with_the_slowdown(cells) -> None:
    for noise in GRID:
        row = [c.share(Verdict.REGRESSED) for c in cells if c.noise == noise.name]
        assert row == sorted(row)


def test_the_grid_is_the_same_for_the_same_seed() -> None:
    noises = NOISES[:1]
    assert grid(POLICY, 100, 3, noises, (6,)) == grid(POLICY, 100, 3, noises, (6,))


def test_a_bar_that_is_missed_says_so() -> None:
    assert not Bar("power", 0.5, 0.95, True, "").holds
    assert Bar("alarms", 0.01, 0.01, False, "").holds


@pytest.mark.parametrize("noise", NOISES, ids=lambda n: n.name)
def test_equal_sides_have_ratios_around_one(noise: Noise) -> None:
    """Symmetric by construction: the mean ratio of many rounds is 0 within five standard errors."""
    ratios = draw(noise, 8, 400, np.random.default_rng(1))
    assert ratios.shape == (400, 8)
    means = ratios.mean(axis=1)
    assert abs(means.mean()) < 5 * means.std() / np.sqrt(means.size)


def test_the_noise_of_a_process_is_that_of_its_model() -> None:
    """Only process noise: a log ratio is the difference of two normal variables."""
    ratios = draw(Noise("p", sample=1e-9, process=0.02), 8, 4000, np.random.default_rng(0))
    assert ratios.std() == pytest.approx(0.02 * np.sqrt(2), rel=0.02)


def test_what_the_machine_does_to_both_sides_cancels() -> None:
    """A drift of 10 % that hardly moves between neighbouring blocks leaves far less than 10 % in a ratio."""
    ratios = draw(
        Noise("d", sample=1e-9, process=0.0, drift=0.1, memory=0.999), 8, 500, np.random.default_rng(0)
    )
    assert ratios.std() < 0.01


def test_the_tolerance_is_that_of_kernels() -> None:
    assert POLICY.rule_for({"metric": "time_ms", "suite": "gemm"}).tolerance == TOLERANCE
