"""Verdict on paired runs. Oracles: rules of the design applied by hand, scipy's t interval and a plain loop; planted truths, each
way to a false PASS with its honest twin; straight lines in log(step); bitwise twins."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from curves_for_tests import STEPS, control, falling, gate, run_of, shifted, with_loss
from hypothesis import given
from hypothesis import strategies as st

from harness.judge.verdict import Curve, Run, judge_other_seeds, judge_pairs
from harness.judge.verdict.curves import Pairs, ema, half_life, pair
from harness.judge.verdict.gates import Evidence, trend
from harness.judge.verdict.result import MARGIN
from harness.judge.verdict.spike_events import Calm

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


# L1


def broken_at(name, seed, step, value=math.nan):
    """A candidate of which one curve of one seed holds such a value at a step."""
    runs = shifted(BASE)
    values = getattr(BASE[seed], name if name != "fp8_grad_norm" else "grad_norm").values.copy()
    values[step] = value
    return {**runs, seed: dataclasses.replace(runs[seed], **{name: Curve.of(values)})}


@pytest.mark.parametrize(
    ("runs", "where"),
    [
        (lambda: broken_at("loss", 2, slice(285, None)), "seed 2 at step 285"),
        (lambda: broken_at("grad_norm", 1, 7, math.inf), "seed 1 at step 7"),
        (lambda: broken_at("fp8_grad_norm", 1, 7), "seed 1 at step 7"),
        (
            lambda: with_loss(shifted(BASE), 4, BASE[4].loss.values[:40], nonfinite_step=40),
            "seed 4 at step 40",
        ),
    ],
    ids=["a tail of NaN", "an infinite gradient", "a norm of the FP8 layers", "a curve that was cut"],
)
def test_what_is_not_finite_fails_and_the_other_gates_go_on_without_that_seed(runs, where):
    verdict = judge_pairs(runs(), BASE)
    assert (verdict.outcome, gate(verdict, "L1").status, gate(verdict, "L4").seeds) == ("FAIL", "FAIL", 4)
    assert where in gate(verdict, "L1").sentence


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


def test_missing_curves_are_inconclusive_not_passed():
    bare = {s: Run(r.loss) for s, r in BASE.items()}
    verdict = judge_pairs(shifted(BASE), bare)
    assert [gate(verdict, g).status for g in ("L4h", "L6")] == ["INCONCLUSIVE"] * 2
    assert verdict.outcome == "INCONCLUSIVE"


@pytest.mark.parametrize(("steps", "values"), [([], []), ([0, 0], [1, 2]), ([0, 1], [1])])
def test_a_curve_refuses_what_is_none(steps, values):
    with pytest.raises(ValueError, match="curve"):
        Curve.of(values, np.array(steps, dtype=float))


# Ways to a PASS where it is false


def with_losses(runs: dict[int, Run], change) -> dict[int, Run]:
    """The runs with `change(seed, losses)` in place of their losses; the held-out losses stay."""
    return {
        seed: dataclasses.replace(run, loss=Curve(run.loss.steps, change(seed, run.loss.values.copy())))
        for seed, run in runs.items()
    }


def bump(first: int, last: int | None, size: float, seeds=None):
    def change(seed: int, values: np.ndarray) -> np.ndarray:
        if seeds is None or seed in seeds:
            values[first:last] += size
        return values

    return change


@pytest.mark.parametrize(("seeds", "size"), [(60, 0.11), (100, 0.19), (30, 0.053)])
def test_one_seed_in_many_that_went_wrong_is_named_and_nothing_passes_beside_it(seeds, size):
    """A gap of 2.4 to 9 % of the loss, for which the mean over so many seeds has room."""
    base = control(range(seeds))
    runs = with_losses(shifted(base), bump(120, None, size, [3]))
    late = gate(judge_pairs(runs, base), "L4")
    assert late.status == "INCONCLUSIVE"
    assert "seed 3 is off by" in late.sentence
    assert gate(judge_pairs(shifted(base), base), "L4").status == "PASS"


def test_a_golden_arm_that_scatters_is_no_measure():
    """A bump of 10 % fails without a golden arm, and so it does beside one whose seeds differ by 5 %."""
    bumped = with_losses(shifted(BASE), bump(0, 80, 0.25))
    assert judge_pairs(bumped, BASE).outcome == "FAIL"
    scatter = np.random.default_rng(1).normal(0, 0.12, 5)
    wild = with_losses(shifted(BASE), lambda seed, values: values + scatter[seed])
    assert gate(judge_pairs(bumped, BASE, golden=wild), "L3").status == "FAIL"
    alike = with_losses(shifted(BASE), bump(0, 80, 0.25))
    assert gate(judge_pairs(bumped, BASE, golden=alike), "L3").status == "FAIL"
    assert gate(judge_pairs(shifted(BASE), BASE, golden=shifted(BASE)), "L3").status == "PASS"


def with_fp8_norms(runs: dict[int, Run], norms) -> dict[int, Run]:
    return {s: dataclasses.replace(r, fp8_grad_norm=Curve(r.loss.steps, norms(s))) for s, r in runs.items()}


def test_an_unusable_norm_of_the_fp8_layers_is_not_replaced_by_one_that_hides_them():
    """The candidate's are twice the golden arm's; that has a single 0, which no ratio can take."""
    ones = 1 + 1e-9 * np.arange(STEPS)
    zero = ones.copy()
    zero[17] = 0.0
    candidate = with_fp8_norms(shifted(BASE), lambda s: 2 * ones)
    assert (
        gate(judge_pairs(candidate, BASE, golden=with_fp8_norms(shifted(BASE), lambda s: ones)), "L6").status
        == "FAIL"
    )
    broken = gate(judge_pairs(candidate, BASE, golden=with_fp8_norms(shifted(BASE), lambda s: zero)), "L6")
    assert broken.status == "INCONCLUSIVE"


def test_a_held_out_loss_of_the_first_step_is_not_the_final_one():
    early = {s: dataclasses.replace(r, heldout=Curve.of([3.5], [0])) for s, r in BASE.items()}
    mine = {s: dataclasses.replace(r, heldout=Curve.of([3.5], [0])) for s, r in shifted(BASE).items()}
    assert gate(judge_pairs(mine, early), "L4h").status == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("control_step", "status"), [(299, "FAIL"), (12, "INCONCLUSIVE"), (10, "INCONCLUSIVE")]
)
def test_a_control_that_breaks_much_later_excuses_nothing(control_step, status):
    def broken(runs: dict[int, Run], step: int) -> dict[int, Run]:
        return with_losses(runs, lambda s, v: np.where((np.arange(v.size) >= step) & (s == 1), np.nan, v))

    verdict = judge_pairs(broken(shifted(BASE), 10), broken(BASE, control_step))
    assert gate(verdict, "L1").status == status


@pytest.mark.parametrize("switch", [290, 260])
def test_a_warm_up_is_judged_by_its_steps_in_fp8(switch):
    """Two percent worse in every step after the switch, which the other steps of the windows would hide."""

    def worse(seed: int, values: np.ndarray) -> np.ndarray:
        values[switch:] += 0.042 + 1e-4 * seed
        return values

    runs = {s: dataclasses.replace(r, switch_step=switch) for s, r in with_losses(BASE, worse).items()}
    base = dict(BASE)
    verdict = judge_pairs(runs, base, twin=base, twin_name="base")
    assert verdict.outcome == "FAIL"
    same = {
        s: dataclasses.replace(r, switch_step=switch) for s, r in with_losses(BASE, lambda s, v: v).items()
    }
    few = judge_pairs(same, base, twin=base, twin_name="base")
    assert few.outcome == "INCONCLUSIVE"  # under 50 steps ran in FP8
    assert "logged steps ran in FP8" in gate(few, "L3").sentence


def test_a_warm_up_that_cools_down_again_is_judged_in_between():
    """The norms are three times the control's in FP8 and equal after it, most of the steps."""
    steps = np.arange(STEPS)
    in_fp8 = (steps >= 60) & (steps < 120)
    runs = {
        s: dataclasses.replace(
            r,
            switch_step=60,
            switch_back_step=120,
            grad_norm=Curve(r.grad_norm.steps, r.grad_norm.values * np.where(in_fp8, 3.0, 1.0)),
        )
        for s, r in BASE.items()
    }
    base = dict(BASE)
    assert gate(judge_pairs(runs, base, twin=base, twin_name="base"), "L6").status == "FAIL"


def test_a_gap_that_rises_because_the_control_recovers_is_not_called_diverging():
    steps = np.arange(STEPS)
    tail = np.where(steps >= 120, 0.19 * np.exp(-(steps - 120) / 15), 0.0)
    recovering = with_losses(BASE, lambda s, v: v + tail)
    assert ": diverging" not in gate(judge_pairs(shifted(BASE), recovering), "L5").sentence
    growing = shifted(BASE, lambda t: 0.004 * np.clip(np.log(np.maximum(t, 1) / 30), 0, None), sd=1e-5)
    assert ": diverging" in gate(judge_pairs(growing, BASE), "L5").sentence


def test_losses_that_are_not_above_0_have_no_relative_gap():
    below = with_losses(BASE, lambda s, v: v - 5)
    worse = with_losses(shifted(BASE), lambda s, v: v - 4.8)
    verdict = judge_pairs(worse, below)
    assert verdict.outcome == "INCONCLUSIVE"
    assert {gate(verdict, name).status for name in ("L3", "L4", "L5")} == {"INCONCLUSIVE"}
    assert judge_pairs(shifted(BASE), BASE).outcome == "PASS"


# Trend


def growing(size):
    """A gap that grows with log(step) from a tenth of the run on, by so many nats per e-fold."""
    return lambda t: size * np.clip(np.log(np.maximum(t, 1) / 30), 0, None)


def on_lines(slopes, end, length=400):
    """Paired runs whose smoothed gap is a line in log(step), of a mean control loss of 1.

    Args:
        slopes: per e-fold of steps, by seed.
        end: the gap at the end, by seed.
        length: steps.
    """
    steps = np.arange(length, dtype=float)
    x = np.log(steps + 1)
    smooth = np.array(end)[:, None] + np.array(slopes)[:, None] * (x - x[-1])
    d = 0.5 ** (1 / half_life(length))
    gap = np.empty_like(smooth)
    gap[:, 0] = smooth[:, 0] / (1 - d)
    gap[:, 1:] = (smooth[:, 1:] - d * smooth[:, :-1]) / (1 - d)
    np.testing.assert_allclose(ema(gap, steps, half_life(length), from_zero=True), smooth, atol=1e-12)
    flat = np.ones_like(gap)
    pairs = Pairs(tuple(range(len(slopes))), steps, flat + gap, flat)
    none = np.zeros((2, len(slopes)), np.int64)
    return Evidence({}, {}, Calm(pairs, gap, np.zeros(gap.shape, bool), none > 0, none))


def test_a_growing_gap_cannot_be_passed_and_a_flat_or_falling_one_can():
    slow = judge_pairs(shifted(BASE, lambda t: 0.003 * np.log1p(t) / np.log1p(STEPS), sd=1e-5), BASE)
    assert slow.gate("L5").status == "PASS"  # projected to 0.20 % of the loss: inside the margin
    fast = judge_pairs(shifted(BASE, growing(0.0015), sd=1e-5), BASE)
    assert fast.gate("L4").status == "PASS"
    assert fast.gate("L5").status == fast.outcome == "INCONCLUSIVE"
    for gap in (0.0, growing(-0.004)):
        assert judge_pairs(shifted(BASE, gap), BASE).gate("L5").status == "PASS"


def test_the_bound_is_the_one_sided_95_percent_of_the_mean_over_seeds():
    """Oracle: at the step found, mean + t(.95, n - 1) sd / sqrt(n) of the extrapolated lines, by scipy, is the margin."""
    slopes, ends = np.array([0.1, 0.2, 0.3, 0.4]) * MARGIN, np.array([0.1, -0.2, 0.3, 0.0]) * MARGIN
    result = trend(on_lines(slopes, ends))
    lines = ends + slopes * math.log(result.margin_at_step / 400)
    bound = lines.mean() + scipy.stats.t.ppf(0.95, 3) * scipy.stats.sem(lines)
    assert bound == pytest.approx(MARGIN, rel=1e-4)
    assert 1 < result.margin_at_step / 400 <= 1000


@pytest.mark.parametrize(
    ("slope", "end", "step"),
    [
        (0.0, 0.5, math.inf),
        (0.0, 1.5, 400),
        (-0.5, 1.5, 400),
    ],
)
def test_a_bound_that_never_meets_the_margin_or_has_met_it(slope, end, step):
    result = trend(on_lines([slope * MARGIN] * 3, [end * MARGIN] * 3))
    assert result.margin_at_step == step


# Precision patterns, and other seeds


def switched(runs, twin, switch):
    """Runs that equal the twin until the switch."""
    out = {}
    for s, r in runs.items():
        loss, norms = r.loss.values.copy(), r.grad_norm.values.copy()
        loss[:switch], norms[:switch] = twin[s].loss.values[:switch], twin[s].grad_norm.values[:switch]
        out[s] = dataclasses.replace(r, loss=Curve.of(loss), grad_norm=Curve.of(norms), switch_step=switch)
    return out


def test_a_warm_up_is_bitwise_the_control_until_its_switch():
    warm = switched(shifted(BASE), BASE, 60)
    assert judge_pairs(warm, BASE, twin=BASE).outcome == "PASS"
    loss = warm[4].loss.values.copy()
    loss[59] = np.nextafter(loss[59], 9)
    verdict = judge_pairs(with_loss(warm, 4, loss), BASE, twin=BASE, twin_name="base")
    assert verdict.outcome == "FAIL"
    assert "differs from base before the switch: seed 4 at step 59" in gate(verdict, "prefix").sentence


def test_the_early_window_of_a_warm_up_starts_at_its_switch():
    bump = shifted(BASE, lambda t: np.where((t >= 120) & (t < 160), 0.15, 0.0))  # too low for a spike
    result = gate(judge_pairs(switched(bump, BASE, 120), BASE, twin=BASE), "L3")
    assert result.status == "FAIL"
    assert result.sentence.startswith("steps 120 to 219")


@pytest.mark.parametrize("switch", [0, 60])
def test_a_golden_arm_which_has_no_warm_up_sets_no_band_for_one(switch):
    """The golden arm is as far off as the candidate: its band would pass what the fixed one warns of."""
    golden = shifted(BASE, 0.011)
    runs = switched(shifted(BASE, 0.011), BASE, switch)
    found = gate(judge_pairs(runs, BASE, golden=golden, twin=BASE), "L3")
    assert (found.status, "fixed band, no golden arm" in found.sentence) == ("WARN", True)
    assert gate(judge_pairs(shifted(BASE, 0.011), BASE, golden=golden), "L3").status == "PASS"


def test_a_cool_down_is_bitwise_the_fp8_arm_until_its_switch():
    fp8 = shifted(BASE, 0.002)
    cool = switched(shifted(BASE, 0.0005), fp8, 240)
    verdict = judge_pairs(cool, BASE, twin=fp8, twin_name="tensorwise")
    assert gate(verdict, "prefix").status == "PASS"
    assert any(
        note.startswith("late gap after the cool-down") and "no larger" in note for note in verdict.notes
    )
    wrong = judge_pairs(switched(shifted(BASE, 0.0005), BASE, 240), BASE, twin=fp8)
    assert gate(wrong, "prefix").status == "FAIL"


def test_a_cool_down_is_judged_by_its_steps_in_fp8():
    """A ratio of 0.8 up to the switch at 60 of 300 steps: the median over the whole run is exactly 1 and hides it."""
    fp8 = shifted(BASE)
    for seed, run in fp8.items():
        fp8[seed] = dataclasses.replace(run, grad_norm=Curve.of(run.grad_norm.values * 0.8))
    cool = switched(shifted(BASE), fp8, 60)
    assert np.median(cool[0].grad_norm.values / BASE[0].grad_norm.values) == pytest.approx(1)
    verdict = judge_pairs(cool, BASE, twin=fp8)
    assert gate(verdict, "L6").status == "FAIL"
    assert gate(verdict, "L6").effect == pytest.approx(0.8)
    assert gate(verdict, "L3").sentence.startswith("steps 0 to 59")


def test_a_span_without_a_logged_step_cannot_tell():
    fp8 = shifted(BASE)
    verdict = judge_pairs(switched(shifted(BASE), fp8, 0), BASE, twin=fp8)
    assert [gate(verdict, name).status for name in ("L3", "L6")] == ["INCONCLUSIVE"] * 2
    assert "0 logged steps ran in FP8" in gate(verdict, "L3").sentence
    assert gate(verdict, "prefix").status == "INCONCLUSIVE"


# Other seeds


def test_other_seeds_pass_the_wide_band_and_a_worse_arm_does_not():
    other = {s: run_of(falling(50 + s)) for s in range(5)}
    found = judge_other_seeds(other, BASE)
    assert found.outcome == "PASS"
    # Oracle: scipy's prediction interval of one more run, at 99 % for all five together.
    late = [BASE[s].loss.values[-60:].mean() for s in BASE]
    half = scipy.stats.t.ppf(1 - 0.005 / 5, 4) * np.std(late, ddof=1) * math.sqrt(1 + 1 / 5)
    assert gate(found, "band").margin == pytest.approx(half / np.mean(late), rel=1e-3)
    worse = {s: run_of(falling(50 + s) + 0.3) for s in range(5)}
    assert judge_other_seeds(worse, BASE).outcome == "FAIL"
    overfitted = {
        s: dataclasses.replace(r, heldout=Curve(r.heldout.steps, r.heldout.values + 0.3))
        for s, r in other.items()
    }
    assert judge_other_seeds(overfitted, BASE).outcome == "FAIL"
    assert judge_other_seeds(other, {0: BASE[0]}).outcome == "INCONCLUSIVE"
    fewer = judge_other_seeds({s: r for s, r in other.items() if s}, BASE)
    assert (fewer.outcome, fewer.notes) == ("INCONCLUSIVE", ("no run for seed 0",))


@pytest.mark.parametrize(
    ("twin", "words"),
    [
        (None, "no run of base to compare the first phase with"),
        ({s: r for s, r in BASE.items() if s != 3}, "no run of base for seed 3"),
    ],
)
def test_a_pattern_whose_twin_lacks_a_seed_cannot_pass(twin, words):
    verdict = judge_pairs(switched(shifted(BASE), BASE, 60), BASE, twin=twin, twin_name="base")
    assert gate(verdict, "prefix").sentence == words
    assert verdict.outcome == "INCONCLUSIVE"


@pytest.mark.parametrize("side", ["candidate", "control"])
def test_one_seed_whose_losses_repeat_anothers_is_left_out_and_named(side):
    runs, base = shifted(BASE), dict(BASE)
    if side == "candidate":
        runs[3] = runs[1]
    else:
        base[3] = base[1]
    pairs = pair(runs, base)
    assert pairs.seeds == (0, 1, 2, 4)
    assert pairs.problems == (f"seed 3: the loss of the {side} repeats that of seed 1 at every step",)
    assert judge_pairs(runs, base).outcome == "INCONCLUSIVE"


def test_the_step_at_which_the_margin_is_met_is_that_of_the_line():
    """Oracle: without a spread between seeds the bound is the line itself, 0.5 M + 0.25 M ln(steps / 400) = M."""
    result = trend(on_lines([0.25 * MARGIN] * 3, [0.5 * MARGIN] * 3))
    assert result.margin_at_step == pytest.approx(400 * math.exp(2), rel=1e-4)
    assert f"after {result.margin_at_step:,.0f} steps" in result.sentence
