"""Verdict on paired runs. Oracles: rules of the design applied by hand, scipy's t interval and a plain loop; planted truths, each
way to a false PASS with its honest twin; bitwise twins."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from curves_for_tests import STEPS, control, falling, gate, run_of, shifted, with_loss
from hypothesis import given
from hypothesis import strategies as st

from harness.judge.verdict import Curve, ema, judge_other_seeds, judge_pairs
from harness.judge.verdict.result import MARGIN

BASE = control()
T = np.arange(STEPS)


def statuses(verdict, *names):
    return [gate(verdict, name).status for name in names]


def with_losses(runs, change, only=None):
    """The runs with `change(seed, losses)` in place of the losses of some seeds; the held-out losses stay."""
    return {
        seed: dataclasses.replace(run, loss=Curve(run.loss.steps, change(seed, run.loss.values.copy())))
        if only is None or seed in only
        else run
        for seed, run in runs.items()
    }


def replaced(runs, name, change):
    """The runs with another curve of that name: `change(seed, values)`."""
    return {
        s: dataclasses.replace(r, **{name: Curve(getattr(r, name).steps, change(s, getattr(r, name).values.copy()))})
        for s, r in runs.items()
    }  # fmt: skip


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


# L1


# L2, L3, L5: parts of the one rule that withhold PASS


def waves(seed, v):
    return v * (1 + 0.03 * np.sin(T / 25 + seed))


def spiked(s, v):
    return v + 0.4 * (abs(T - 80 - 30 * s) < 4)


WITHHELD = {
    "an early bump": ("L3", lambda s, v: v + 0.06 * (T < 20), None),
    "slow waves of each run's own": ("L3", waves, None),
    "one seed off from step 120 on": ("L3", lambda s, v: v + 0.11 * (T >= 120), [3]),
    "a spike in every run": ("L2", spiked, None),
    "a gap that grows": ("L5", lambda s, v: v + 0.004 * np.clip(np.log(np.maximum(T, 1) / 100), 0, None), None),
}  # fmt: skip


@pytest.mark.parametrize("case", WITHHELD)
def test_what_a_course_shows_withholds_pass_and_its_twin_in_both_arms_does_not(case):
    name, change, seeds = WITHHELD[case]
    verdict = judge_pairs(with_losses(shifted(BASE), change, seeds), BASE)
    assert (verdict.outcome, gate(verdict, name).status) == ("INCONCLUSIVE", "INCONCLUSIVE")
    both = with_losses(BASE, change, seeds)
    assert judge_pairs(shifted(both), both).outcome == "PASS"


# L4


def test_the_end_agrees_with_scipy():
    """Oracle: scipy's 92 % t interval of the seeds' trimmed means over the last fifth, in shares of the base's median course."""
    runs = shifted(BASE, 0.001, sd=5e-4)
    late = T >= (STEPS - 1) * 0.8
    level = np.median([r.loss.values for r in BASE.values()], axis=0)
    mine, base = (
        np.sort(np.array([of[s].loss.values / level for s in BASE])[:, late], axis=1)[:, 12:-12].mean(axis=1)
        for of in (runs, BASE)
    )
    gaps = mine - base
    low, high = scipy.stats.t.interval(0.92, 4, gaps.mean(), scipy.stats.sem(gaps))
    result = gate(judge_pairs(runs, BASE), "L4")
    assert (result.effect, result.low, result.high) == pytest.approx((gaps.mean(), low, high), rel=1e-6)
    assert result.sd == pytest.approx(gaps.std(ddof=1))
    assert (result.seeds, result.margin) == (5, MARGIN)


@pytest.mark.parametrize(
    ("gap", "sd", "status"),
    [(0.0, 2e-4, "PASS"), (0.02, 2e-4, "FAIL"), (-0.02, 2e-4, "FAIL"), (0.00525, 5e-4, "INCONCLUSIVE")],
)
def test_equivalence_has_three_outcomes_and_two_sides(gap, sd, status):
    verdict = judge_pairs(shifted(BASE, gap, sd), BASE)
    assert (verdict.outcome, gate(verdict, "L4").status) == (status, status)


def test_heldout_loss_is_judged_for_itself():
    runs = replaced(shifted(BASE), "heldout", lambda s, v: v + 0.05)
    verdict = judge_pairs(runs, BASE)
    assert (verdict.outcome, statuses(verdict, "L4", "L4h")) == ("FAIL", ["PASS", "FAIL"])
    early = (
        {s: dataclasses.replace(r, heldout=Curve.of([3.5], [0])) for s, r in of.items()}
        for of in (runs, BASE)
    )
    assert statuses(judge_pairs(*early), "L4h") == ["INCONCLUSIVE"]  # of the first step is not the final one


def test_a_margin_is_asked_for_or_a_twentieth_of_what_is_learned():
    runs = shifted(BASE, 0.02)
    assert statuses(judge_pairs(runs, BASE, margin=0.02), "L4") == ["PASS"]
    with pytest.raises(ValueError, match="margin=0 must be above 0"):
        judge_pairs(runs, BASE, margin=0)


# Pairing and what is said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda runs: {**runs, 9: runs[0]}, "the control has no run of seed 9"),
        (
            lambda runs: with_loss(runs, 1, falling(1)[:200], stopped="interrupted"),
            "seed 1: the candidate has 200 logged steps of 300 (interrupted)",
        ),
        (
            lambda runs: {**runs, 2: dataclasses.replace(runs[2], loss=Curve.of(falling(2), T * 2))},
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


@pytest.mark.parametrize(("steps", "values"), [([], []), ([0, 0], [1, 2]), ([0, 1], [1])])
def test_a_curve_refuses_what_is_none(steps, values):
    with pytest.raises(ValueError, match="curve"):
        Curve.of(values, np.array(steps, dtype=float))


def test_losses_that_are_not_above_0_have_no_relative_gap():
    verdict = judge_pairs(
        with_losses(shifted(BASE), lambda s, v: v - 4.8), with_losses(BASE, lambda s, v: v - 5)
    )
    assert verdict.outcome == "INCONCLUSIVE"
    assert set(statuses(verdict, "L3", "L4", "L5")) == {"INCONCLUSIVE"}


def test_an_unusable_norm_of_the_fp8_layers_is_not_replaced_by_one_that_hides_them():
    """The candidate's are twice the golden arm's; that has a single 0, which no ratio can take."""
    ones = 1 + 1e-9 * T

    def norms(values):
        return {s: dataclasses.replace(r, fp8_grad_norm=Curve.of(values)) for s, r in shifted(BASE).items()}

    for golden, status in ((ones, "FAIL"), (np.where(T == 17, 0, ones), "INCONCLUSIVE")):
        assert statuses(judge_pairs(norms(2 * ones), BASE, golden=norms(golden)), "L6") == [status]


# Precision patterns


def switched(runs, twin, switch):
    """Runs that equal the twin until the switch."""
    return {
        s: dataclasses.replace(
            r,
            loss=Curve.of(np.where(switch > T, twin[s].loss.values, r.loss.values)),
            grad_norm=Curve.of(np.where(switch > T, twin[s].grad_norm.values, r.grad_norm.values)),
            switch_step=switch,
        )
        for s, r in runs.items()
    }


def test_a_warm_up_is_bitwise_the_control_until_its_switch():
    warm = switched(shifted(BASE), BASE, 60)
    assert judge_pairs(warm, BASE, twin=BASE).outcome == "PASS"
    loss = warm[4].loss.values.copy()
    loss[59] = np.nextafter(loss[59], 9)
    verdict = judge_pairs(with_loss(warm, 4, loss), BASE, twin=BASE, twin_name="base")
    assert verdict.outcome == "FAIL"
    assert "differs from base before the switch: seed 4 at step 59" in gate(verdict, "prefix").sentence


@pytest.mark.parametrize(("switch", "outcome"), [(240, "FAIL"), (290, "INCONCLUSIVE")])
def test_a_warm_up_is_judged_by_its_steps_in_fp8(switch, outcome):
    """Two percent worse in every step after the switch; under 50 steps in FP8 nobody can tell."""
    worse = switched(with_losses(shifted(BASE), lambda s, v: v + 0.042), BASE, switch)
    verdict = judge_pairs(worse, BASE, twin=BASE)
    assert gate(verdict, "L4").status == outcome
    assert ("logged steps ran in FP8" in gate(verdict, "L3").sentence) == (switch == 290)


def test_a_cool_down_is_bitwise_the_fp8_arm_until_its_switch():
    fp8 = shifted(BASE, 0.002)
    verdict = judge_pairs(switched(shifted(BASE, 0.0005), fp8, 240), BASE, twin=fp8)
    assert statuses(verdict, "prefix") == ["PASS"]
    assert any(n.startswith("late gap after the cool-down") and "no larger" in n for n in verdict.notes)
    wrong = judge_pairs(switched(shifted(BASE, 0.0005), BASE, 240), BASE, twin=fp8)
    assert statuses(wrong, "prefix") == ["FAIL"]


def test_the_gradients_of_a_cool_down_are_judged_by_its_steps_in_fp8():
    """A ratio of 0.8 up to the switch at 60 of 300 steps: the median over the whole run is 1 and hides it."""
    fp8 = replaced(shifted(BASE), "grad_norm", lambda s, v: v * 0.8)
    result = gate(judge_pairs(switched(shifted(BASE), fp8, 60), BASE, twin=fp8), "L6")
    assert (result.status, result.effect) == ("FAIL", pytest.approx(0.8))
    at_once = judge_pairs(switched(shifted(BASE), fp8, 0), BASE, twin=fp8)
    assert statuses(at_once, "L6", "prefix") == ["INCONCLUSIVE"] * 2


@pytest.mark.parametrize("twin", [None, {s: r for s, r in BASE.items() if s != 3}])
def test_a_pattern_whose_twin_lacks_a_seed_cannot_pass(twin):
    verdict = judge_pairs(switched(shifted(BASE), BASE, 60), BASE, twin=twin, twin_name="base")
    assert (verdict.outcome, statuses(verdict, "prefix")) == ("INCONCLUSIVE", ["INCONCLUSIVE"])


# Other seeds


def test_other_seeds_pass_the_wide_band_and_a_worse_arm_does_not():
    other = {s: run_of(falling(50 + s)) for s in range(5)}
    found = judge_other_seeds(other, BASE)
    assert found.outcome == "PASS"
    # Oracle: scipy's prediction interval of one more run, at 99 % for all five together.
    late = [BASE[s].loss.values[-60:].mean() for s in BASE]
    half = scipy.stats.t.ppf(1 - 0.005 / 5, 4) * np.std(late, ddof=1) * math.sqrt(1 + 1 / 5)
    assert gate(found, "band").margin == pytest.approx(half / np.mean(late), rel=1e-3)
    assert judge_other_seeds({s: run_of(falling(50 + s) + 0.3) for s in other}, BASE).outcome == "FAIL"
    overfitted = replaced(other, "heldout", lambda s, v: v + 0.3)
    assert judge_other_seeds(overfitted, BASE).outcome == "FAIL"
    assert judge_other_seeds(other, {0: BASE[0]}).outcome == "INCONCLUSIVE"
    fewer = judge_other_seeds({s: r for s, r in other.items() if s}, BASE)
    assert (fewer.outcome, fewer.notes) == ("INCONCLUSIVE", ("no run for seed 0",))
