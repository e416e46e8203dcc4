"""Verdict. Oracles: rules of the design applied by hand, scipy's t interval and a plain loop; planted truths."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from curves_for_tests import STEPS, control, falling, gate, run_of, shifted, with_loss
from hypothesis import given
from hypothesis import strategies as st

from harness.judge.verdict import Curve, Run, judge_pairs
from harness.judge.verdict.curves import ema, half_life, pair
from harness.judge.verdict.result import MARGIN

BASE = control()


# Moving average


@given(
    st.lists(st.floats(-10, 10), min_size=2, max_size=60),
    st.floats(0.5, 50),
    st.booleans(),
    st.integers(1, 7),
)
def test_moving_average_agrees_with_its_recurrence(values, life, from_zero, stride):
    """Oracle: e_t = d e_(t-1) + (1 - d) x_t with d = 2^(-stride / half-life), normalised or not."""
    x = np.array(values)
    d, e, mass, expected = 0.5 ** (stride / life), 0.0, 0.0, []
    for v in x:
        e, mass = d * e + (1 - d) * v, d * mass + (1 - d)
        expected.append(e if from_zero else e / mass)
    got = ema(x[None], stride * np.arange(x.size, dtype=float), life, from_zero=from_zero)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_moving_average_of_a_run_longer_than_a_block_has_no_seam():
    x = np.random.default_rng(0).normal(size=5000)
    steps = np.arange(5000.0)
    short = ema(x, steps, 2.0)  # 900 half-lives are 1,800 steps
    long = np.array([ema(x[i - 200 : i + 1], steps[i - 200 : i + 1], 2.0)[-1] for i in range(1000, 5000, 97)])
    np.testing.assert_allclose(short[1000::97], long, rtol=1e-12, atol=1e-12)


def test_half_life_changes_above_a_thousand_steps():
    assert [half_life(n) for n in (1, 1000, 1001)] == [20, 20, 100]


# L1


def test_a_nan_tail_fails_and_the_other_gates_go_on_without_that_seed():
    loss = BASE[2].loss.values.copy()
    loss[-15:] = math.nan
    verdict = judge_pairs(with_loss(shifted(BASE), 2, loss), BASE)
    assert verdict.outcome == "FAIL"
    assert "seed 2 at step 285" in gate(verdict, "L1").sentence
    assert gate(verdict, "L4").seeds == 4


def test_an_infinite_gradient_and_a_cut_curve_count_as_not_finite():
    norms = BASE[1].grad_norm.values.copy()
    norms[7] = math.inf
    runs = shifted(BASE)
    runs[1] = dataclasses.replace(runs[1], grad_norm=Curve.of(norms))
    assert "seed 1 at step 7" in gate(judge_pairs(runs, BASE), "L1").sentence
    cut = with_loss(shifted(BASE), 4, BASE[4].loss.values[:40], nonfinite_step=40, stopped="loss is NaN")
    verdict = judge_pairs(cut, BASE)
    assert gate(verdict, "L1").status == "FAIL"
    assert "seed 4 at step 40" in gate(verdict, "L1").sentence


def test_where_the_control_breaks_in_the_same_seed_nobody_can_tell():
    loss = BASE[0].loss.values.copy()
    loss[50:] = math.nan
    broken = with_loss(BASE, 0, loss)
    verdict = judge_pairs(with_loss(shifted(BASE), 0, loss), broken)
    assert verdict.outcome == "INCONCLUSIVE"
    assert "the control broke in the same seeds" in gate(verdict, "L1").sentence
    also = judge_pairs(with_loss(with_loss(shifted(BASE), 0, loss), 1, loss), broken)
    assert also.outcome == "FAIL"


# L3


@pytest.mark.parametrize(("share", "status"), [(0.001, "PASS"), (0.004, "WARN"), (0.02, "FAIL")])
@pytest.mark.parametrize("sign", [1, -1])
def test_early_gap_against_the_fixed_band_on_both_sides(share, status, sign):
    """0.25 % is the band, 1 % four bands; the gap is gone after the first third."""
    runs = shifted(BASE, lambda t: np.where(t < 100, sign * share * 2.5, 0.0))
    assert gate(judge_pairs(runs, BASE), "L3").status == status


def test_the_golden_arm_sets_the_early_band():
    """A gap of 0.26 % that the fixed band lets through with a warning lies far outside of what golden runs show."""
    golden = shifted(BASE, 0.0007, sd=2e-4)
    rolled = shifted(BASE, lambda t: np.where(t < 100, 0.0073, 0.0), sd=2e-4)
    assert gate(judge_pairs(rolled, BASE), "L3").status in ("PASS", "WARN")
    verdict = judge_pairs(rolled, BASE, golden=golden)
    assert gate(verdict, "L3").status == "FAIL"
    assert "band of 5 golden runs" in gate(verdict, "L3").sentence
    own = judge_pairs(golden, BASE, golden=golden)
    assert gate(own, "L3").status == "PASS"


@pytest.mark.parametrize(("seeds", "status"), [(3, "INCONCLUSIVE"), (4, "INCONCLUSIVE"), (5, "WARN")])
def test_a_band_of_few_golden_seeds_cannot_warn(seeds, status):
    """A gap of two bands. Oracle: the half-width t(.995, S-1) sd sqrt(1 + 1/S) of the golden arm's gaps, by scipy."""
    golden = {s: r for s, r in shifted(BASE, 0.0007, sd=2e-4).items() if s < seeds}
    early = slice(0, 100)
    own = [
        (r.loss.values - BASE[s].loss.values)[early].mean() / BASE[s].loss.values[early].mean()
        for s, r in golden.items()
    ]
    half = scipy.stats.t.ppf(0.995, seeds - 1) * np.std(own, ddof=1) * math.sqrt(1 + 1 / seeds)
    wide = {s: run_of(r.loss.values * (1 + np.mean(own) + 2 * half)) for s, r in BASE.items()}
    result = gate(judge_pairs(wide, BASE, golden=golden), "L3")
    assert result.status == status
    assert ("too few of 5" in result.sentence) == (seeds < 5)
    assert gate(judge_pairs(golden, BASE, golden=golden), "L3").status == "PASS"


# L4


def test_late_window_agrees_with_scipy():
    """Oracle: scipy's 90 % t interval of the per-seed means over the last fifth."""
    runs = shifted(BASE, 0.001, sd=5e-4)
    late = np.arange(STEPS) >= (STEPS - 1) * 0.8
    gaps = np.array([(runs[s].loss.values - BASE[s].loss.values)[late].mean() for s in BASE])
    scale = np.mean([BASE[s].loss.values[late].mean() for s in BASE])
    low, high = scipy.stats.t.interval(0.9, 4, gaps.mean(), scipy.stats.sem(gaps))
    result = gate(judge_pairs(runs, BASE), "L4")
    assert (result.effect, result.low, result.high) == pytest.approx(
        (gaps.mean() / scale, low / scale, high / scale)
    )
    assert result.sd == pytest.approx(gaps.std(ddof=1) / scale)
    assert (result.seeds, result.margin) == (5, 0.0025)


@pytest.mark.parametrize(
    ("gap", "sd", "status"),
    [(0.0, 2e-4, "PASS"), (0.02, 2e-4, "FAIL"), (-0.02, 2e-4, "FAIL"), (0.00525, 5e-4, "INCONCLUSIVE")],
)
def test_equivalence_has_three_outcomes_and_two_sides(gap, sd, status):
    assert gate(judge_pairs(shifted(BASE, gap, sd), BASE), "L4").status == status


def test_a_gap_outside_the_margin_needs_the_wider_interval_to_fail():
    """Oracle: scipy's t intervals of gaps whose 90 % interval misses the margin and whose 99 % one does not."""
    unit = np.array([-1.0, 0.0, 1.0])
    base = control(range(3))
    runs = {s: run_of(base[s].loss.values + 0.012 + 0.003 * unit[s]) for s in base}
    late = np.arange(STEPS) >= (STEPS - 1) * 0.8
    scale = np.mean([base[s].loss.values[late].mean() for s in base])
    gaps = (0.012 + 0.003 * unit) / scale
    narrow, wide = (scipy.stats.t.interval(c, 2, gaps.mean(), scipy.stats.sem(gaps)) for c in (0.9, 0.99))
    result = gate(judge_pairs(runs, base), "L4")
    assert wide[0] < MARGIN < narrow[0] == pytest.approx(result.low)
    assert result.status == "INCONCLUSIVE"


@pytest.mark.parametrize("side", ["candidate", "control"])
def test_one_seed_whose_losses_repeat_anothers_is_left_out_and_named(side):
    runs, base = shifted(BASE), dict(BASE)
    if side == "candidate":
        runs[3] = runs[1]
    else:
        base[3] = base[1]
    pairs = pair(runs, base)
    assert pairs.seeds == (0, 1, 2, 4)
    assert pairs.problems == (f"seed 3: the losses of the {side} repeat those of seed 1 bit for bit",)
    assert judge_pairs(runs, base).outcome == "INCONCLUSIVE"


def test_gaps_that_are_all_equal_are_one_run():
    """Different controls and one gap for all, but for the rounding of sums; at two margins it is no FAIL either."""
    for nats in (0.001, 0.0105):
        runs = {s: run_of(r.loss.values + nats) for s, r in BASE.items()}
        assert pair(runs, BASE).seeds == (0,)
        assert judge_pairs(runs, BASE).outcome == "INCONCLUSIVE"
    slightly = {s: run_of(r.loss.values + 0.001 * (1 + 1e-3 * s)) for s, r in BASE.items()}
    assert pair(slightly, BASE).problems == ()


def test_heldout_loss_is_judged_for_itself():
    runs = shifted(BASE)
    for s, r in runs.items():
        assert r.heldout is not None
        runs[s] = dataclasses.replace(r, heldout=Curve(r.heldout.steps, r.heldout.values + 0.05))
    verdict = judge_pairs(runs, BASE)
    assert (gate(verdict, "L4").status, gate(verdict, "L4h").status) == ("PASS", "FAIL")
    assert verdict.outcome == "FAIL"


def test_a_wider_margin_passes_what_a_narrow_one_cannot():
    runs = shifted(BASE, 0.02)
    assert gate(judge_pairs(runs, BASE, margin=0.02), "L4").status == "PASS"
    with pytest.raises(ValueError, match="margin=0 must be above 0"):
        judge_pairs(runs, BASE, margin=0)


# Pairing and what is said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda runs: {s: r for s, r in runs.items() if s != 3}, "the candidate has no run of seed 3"),
        (lambda runs: {**runs, 9: runs[0]}, "the control has no run of seed 9"),
        (
            lambda runs: with_loss(runs, 1, falling(1)[:200], stopped="interrupted"),
            "seed 1: the candidate has 200 logged steps of 300 (interrupted)",
        ),
        (
            lambda runs: {
                **runs,
                2: dataclasses.replace(runs[2], loss=Curve.of(falling(2), np.arange(300) * 2)),
            },
            "seed 2: the candidate was logged at other steps",
        ),
        (
            lambda runs: {**runs, 0: dataclasses.replace(runs[0], planned_steps=1000, stopped="killed")},
            "seed 0: the candidate ended at step 300 of 1000 (killed)",
        ),
    ],
)
def test_runs_without_an_equal_partner_are_named_and_never_passed(change, words):
    verdict = judge_pairs(change(shifted(BASE)), BASE)
    assert words in verdict.notes
    assert verdict.outcome == "INCONCLUSIVE"


def test_two_seeds_and_short_runs_are_inconclusive():
    two = {s: BASE[s] for s in (0, 1)}
    verdict = judge_pairs(shifted(two), two)
    assert verdict.outcome == "INCONCLUSIVE"
    assert "2 paired seeds" in gate(verdict, "L4").sentence
    short = control(steps=40)
    verdict = judge_pairs(shifted(short), short)
    assert "40 logged steps" in gate(verdict, "L4").sentence
    assert verdict.outcome == "INCONCLUSIVE"


def test_missing_curves_are_inconclusive_not_passed():
    bare = {s: Run(r.loss) for s, r in BASE.items()}
    verdict = judge_pairs(shifted(BASE), bare)
    assert [gate(verdict, g).status for g in ("L4h", "L6")] == ["INCONCLUSIVE"] * 2
    assert verdict.outcome == "INCONCLUSIVE"


def test_judging_needs_runs_on_both_sides():
    with pytest.raises(ValueError, match="0 candidate and 5 control runs"):
        judge_pairs({}, BASE)


@pytest.mark.parametrize(("steps", "values"), [([], []), ([0, 0], [1, 2]), ([0, 1], [1])])
def test_a_curve_refuses_what_is_none(steps, values):
    with pytest.raises(ValueError, match="curve"):
        Curve.of(values, np.array(steps, dtype=float))
