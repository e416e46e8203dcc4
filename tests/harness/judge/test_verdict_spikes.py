"""Spikes in the verdict. Oracles: planted events counted by hand, combinatorics of the runs, planted truths."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from curves_for_tests import STEPS, control, gate, shifted

from harness.judge.verdict import Curve, judge_pairs
from harness.judge.verdict.curves import pair
from harness.judge.verdict.spike_events import calm

BASE = control()


def added(runs, seed, first, nats):
    """The runs with so many nats on top of one seed's loss, from one step on."""
    loss = runs[seed].loss.values.copy()
    loss[first : first + len(nats)] += nats
    return {**runs, seed: dataclasses.replace(runs[seed], loss=Curve.of(loss))}


def spiked(runs, seeds, starts=(150,), nats=1.0, length=6):
    """The runs with spikes in some seeds."""
    for seed in seeds:
        for start in starts:
            runs = added(runs, seed, start, [nats] * length)
    return runs


def with_norms(runs, seed, first, length, times=20):
    norms = runs[seed].grad_norm.values.copy()
    norms[first : first + length] *= times
    return {**runs, seed: dataclasses.replace(runs[seed], grad_norm=Curve.of(norms))}


def bursts(candidate, base=BASE):
    """Counts by seed of candidate and control."""
    mine, theirs = calm(pair(candidate, base)).bursts
    return mine.tolist(), theirs.tolist()


# Events


@pytest.mark.parametrize(("length", "count"), [(2, 0), (3, 1), (8, 1)])
def test_a_spike_needs_three_steps(length, count):
    assert bursts(spiked(shifted(BASE), [3], length=length)) == ([0, 0, 0, count, 0], [0] * 5)


@pytest.mark.parametrize(("nats", "count"), [(0.15, 0), (0.40, 1)])
@pytest.mark.parametrize("start", [20, 150])
def test_a_spike_must_stand_out_by_a_tenth_of_the_loss(start, nats, count):
    """A tenth of the loss is 0.21 to 0.30 nats; also where the loss falls fast, which a moving average lags behind."""
    nats *= 1.5 if start == 20 else 1
    assert bursts(spiked(shifted(BASE), [3], [start], nats))[0][3] == count


def test_an_event_lasts_until_the_loss_is_back_and_its_tail_is_masked_too():
    tail = 1.0 * np.exp(-np.arange(40) / 8.0)  # above a tenth for 12 steps, above the noise for some 28
    found = calm(pair(added(shifted(BASE), 2, 120, tail), BASE))
    steps = np.flatnonzero(found.masked[2])
    assert steps[0] in (118, 119, 120)
    assert 140 <= steps[-1] <= 170
    assert (np.diff(steps) == 1).all()
    raw = found.pairs.gap[2]
    assert np.abs(found.gap[2, 110:170]).max() < 0.05 < np.abs(raw[110:170]).max()
    np.testing.assert_array_equal(found.gap[~found.masked], found.pairs.gap[~found.masked])


def test_calm_gaps_are_a_line_between_their_neighbours():
    """Oracle: numpy's interpolation over the steps that are not masked."""
    found = calm(pair(spiked(shifted(BASE), [1]), BASE))
    hidden, steps = found.masked[1], found.pairs.steps
    expected = np.interp(steps[hidden], steps[~hidden], found.pairs.gap[1][~hidden])
    np.testing.assert_allclose(found.gap[1][hidden], expected)
    assert 6 <= hidden.sum() <= 12


@pytest.mark.parametrize(("distance", "count"), [(20, 1), (35, 1), (70, 2)])
def test_close_spikes_are_one_burst(distance, count):
    """Two half-lives are 40 steps."""
    assert bursts(spiked(shifted(BASE), [0], (120, 120 + distance)))[0][0] == count


def test_a_gradient_event_joins_the_loss_event_that_it_overlaps():
    runs = spiked(shifted(BASE), [0])
    assert bursts(with_norms(runs, 0, 148, 10))[0][0] == 1
    assert bursts(with_norms(runs, 0, 240, 10))[0][0] == 2


def test_gradient_spikes_need_five_steps_above_ten_medians():
    for length, count in ((4, 0), (5, 1)):
        assert bursts(with_norms(shifted(BASE), 0, 200, length))[0][0] == count


def test_what_does_not_come_back_is_a_shift_and_the_gap_gates_see_it():
    """From step 150 on one nat more, and for 100 steps one nat more: neither is interpolated, each counts once."""
    for length in (STEPS - 150, 100):
        runs = spiked(shifted(BASE), range(5), (150,), length=length)
        found = calm(pair(runs, BASE))
        assert not found.masked.any()
        assert found.bursts[0].tolist() == [1] * 5
    verdict = judge_pairs(spiked(shifted(BASE), range(5), (150,), length=150), BASE)
    assert gate(verdict, "L4").status == "FAIL"


# L2


def test_as_many_spikes_as_the_control_pass():
    base = spiked(BASE, [3])
    result = gate(judge_pairs(shifted(base), base), "L2")
    assert (result.status, result.effect) == ("PASS", 0)
    assert "0/0, 0/0, 0/0, 1/1, 0/0" in result.sentence
    elsewhere = gate(judge_pairs(spiked(shifted(BASE), [1]), base), "L2")
    assert elsewhere.status == "PASS"


@pytest.mark.parametrize(
    ("seeds", "hit", "status"),
    [
        (5, 1, "WARN"),
        (5, 2, "WARN"),
        (5, 3, "INCONCLUSIVE"),
        (5, 5, "FAIL"),
        (8, 3, "INCONCLUSIVE"),
        (8, 6, "FAIL"),
    ],
)
def test_an_excess_is_judged_by_its_probability_under_one_law(seeds, hit, status):
    """Oracle: k spikes in different runs, all in the candidate's half: C(2n - k, n - k) of C(2n, n) deals."""
    base = control(range(seeds))
    p = math.comb(2 * seeds - hit, seeds - hit) / math.comb(2 * seeds, seeds)
    verdict = judge_pairs(spiked(shifted(base), range(hit)), base)
    result = gate(verdict, "L2")
    assert result.status == status == ("FAIL" if p <= 0.01 else "INCONCLUSIVE" if p <= 0.125 else "WARN")
    assert f"{p:.3f}" in result.sentence
    assert verdict.outcome == {"WARN": "PASS"}.get(status, status)


def test_many_spikes_in_one_run_are_no_evidence_and_many_in_every_run_are():
    """Runs of one law may clump; with 8 seeds, all of the larger counts on one side are 1 deal of 12,870."""
    base = spiked(control(range(8)), range(8), (30,))
    many = tuple(range(30, 290, 64))
    one = gate(judge_pairs(spiked(shifted(control(range(8))), [0], many), control(range(8))), "L2")
    assert (one.status, one.effect) == ("WARN", 5)
    every = gate(judge_pairs(spiked(shifted(control(range(8))), range(8), many), base), "L2")
    assert (every.status, every.effect) == ("FAIL", 32)


# The gap gates without spikes


def test_a_window_that_is_mostly_spikes_cannot_be_judged():
    base = spiked(BASE, range(5), (250, 270), nats=2.0, length=10)
    verdict = judge_pairs(shifted(BASE), base)
    assert [gate(verdict, g).status for g in ("L3", "L4")] == ["PASS", "INCONCLUSIVE"]
    assert verdict.outcome == "INCONCLUSIVE"


@pytest.mark.parametrize("seeds", [5, 8, 20])
def test_nothing_passes_beside_a_candidate_that_ends_within_a_spike(seeds):
    """Nobody can tell how it goes on, and one run in twenty that ends like that is one in twenty that may be lost."""
    base = control(range(seeds))
    runs = spiked(shifted(base), [2], (285,), length=15)
    verdict = judge_pairs(runs, base)
    assert verdict.outcome == "INCONCLUSIVE"
    assert gate(verdict, "L4").status == "INCONCLUSIVE"
    assert "seed 2 ends within a spike" in gate(verdict, "L4").sentence


# L3 with many seeds


@pytest.mark.parametrize(("seeds", "status"), [(5, "INCONCLUSIVE"), (20, "WARN")])
def test_one_stray_seed_fails_no_candidate_and_of_few_seeds_it_passes_none(seeds, status):
    """An early gap of 5 % in one seed: beyond four bands there, the mean over seeds may be 0."""
    base = control(range(seeds))
    runs = added(shifted(base), 1, 0, [0.15] * 60)
    assert gate(judge_pairs(runs, base), "L3").status == status


@pytest.mark.parametrize(
    ("seeds", "hit", "status"),
    [(3, 3, "FAIL"), (3, 2, "INCONCLUSIVE"), (5, 4, "FAIL"), (5, 3, "INCONCLUSIVE"), (20, 15, "FAIL")],
)
def test_an_early_gap_of_three_quarters_of_the_seeds_fails(seeds, hit, status):
    base = control(range(seeds))
    runs = shifted(base)
    for seed in range(hit):
        runs = added(runs, seed, 0, [0.15] * 60)
    assert gate(judge_pairs(runs, base), "L3").status == status


def test_early_gaps_of_both_signs_are_no_fault_of_one_kind():
    runs = shifted(BASE)
    for seed in range(5):
        runs = added(runs, seed, 0, [0.15 if seed % 2 else -0.15] * 60)
    assert gate(judge_pairs(runs, BASE), "L3").status == "INCONCLUSIVE"


def test_a_late_divergence_that_is_not_over_never_passes():
    """It is an open event in every run, and L2 has five against none."""
    late = shifted(BASE, lambda t: 0.8 * np.clip((t - 260) / 40, 0, None))
    verdict = judge_pairs(late, BASE)
    assert calm(pair(late, BASE)).ends_in_spike[0].all()
    assert [gate(verdict, g).status for g in ("L2", "L4", "L4h")] == ["FAIL", "INCONCLUSIVE", "FAIL"]
    assert verdict.outcome == "FAIL"
    one = {**shifted(BASE), 3: late[3]}
    assert judge_pairs(one, BASE).outcome == "INCONCLUSIVE"


def test_a_control_that_ends_within_a_spike_costs_its_seed():
    base = control(range(8))
    verdict = judge_pairs(shifted(base), spiked(base, [2], (285,), length=15))
    assert (gate(verdict, "L4").status, gate(verdict, "L4").seeds) == ("PASS", 7)
    assert gate(verdict, "L4h").seeds == 7
    few = judge_pairs(shifted(base), spiked(base, range(6), (285,), length=15))
    assert gate(few, "L4").status == "INCONCLUSIVE"
    assert "only 2 of 8 controls" in gate(few, "L4").sentence
