"""When a loss is reached and when the gap stays in the noise. Oracles: the closed form of a smoothed exponential, straight lines,
sums of step times, scipy."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from curves_for_tests import STEPS, control, rows_of_runs, shifted
from report_fixtures import frame

from harness.judge.verdict import Curve, Run, judge, lines, time_to_loss
from harness.judge.verdict.curves import half_life, pair, relative_gap
from harness.judge.verdict.settle import median_interval, noise_limit, settle
from harness.judge.verdict.time_to_loss import crossing

LOSS = 2.0
SEEDS = range(5)
HAIR = 3e-4


def flat(level: float = LOSS, seeds=SEEDS, steps: int = STEPS):
    """Runs whose loss never moves, by seed; a hair apart, since seeds that repeat each other are no evidence."""
    base = control(seeds, steps)
    return {
        s: dataclasses.replace(r, loss=Curve.of(np.full(steps, level + HAIR * s))) for s, r in base.items()
    }


def with_gap(base, gap):
    """The runs plus a gap: an array, or a function of the seed; a hair larger in each seed."""
    own = gap if callable(gap) else lambda seed: gap
    return {
        s: dataclasses.replace(r, loss=Curve(r.loss.steps, r.loss.values + (1 + HAIR * s) * own(s)))
        for s, r in base.items()
    }


def smoothed_exponential(size: float, decay: float, t: np.ndarray) -> np.ndarray:
    """Average from 0 with half-life h of size r^t: size (1 - d) (r^(t+1) - d^(t+1)) / (r - d), d = 2^(-1/h)."""
    d, r = 0.5 ** (1 / half_life(t.size)), math.exp(-1 / decay)
    return size * (1 - d) * (r ** (t + 1) - d ** (t + 1)) / (r - d)


def ar1(seed: int, sd: float, steps: int = STEPS, rho: float = 0.9) -> np.ndarray:
    generator = np.random.default_rng(seed)
    noise = generator.normal(0, sd * math.sqrt(1 - rho * rho), steps)
    noise[0] = generator.normal(0, sd)
    for i in range(1, steps):
        noise[i] += rho * noise[i - 1]
    return noise


def settled_step(size: float, decay: float, limit: float, steps: int = STEPS) -> int:
    t = np.arange(steps, dtype=float)
    return int(np.flatnonzero(smoothed_exponential(size, decay, t) > limit * LOSS)[-1]) + 1


@pytest.mark.parametrize("sign", [1, -1])
def test_an_exponential_gap_settles_where_its_closed_form_crosses_the_margin(sign):
    base, t = flat(), np.arange(STEPS)
    found = settle(with_gap(base, sign * 0.1 * np.exp(-t / 40)), base)
    expected = settled_step(0.1, 40, 0.0025)
    assert 50 < expected < 250
    assert dict(found.steps) == dict.fromkeys(SEEDS, float(expected))
    assert (found.step, found.interval) == (expected, (expected, expected, 0.9375))
    assert (found.noise_runs, found.limit) == (0, 0.0025)
    assert "the margin (0.250 % of the loss; no perturbed runs" in found.sentence
    assert f"on (median of 5 seeds; 94 % interval: step {expected} to {expected})" in found.sentence
    never = settle(base, base).sentence
    assert never.endswith("at every step of all 5 seeds"), "no interval from 0 to 0"


def test_the_limit_is_the_upper_bound_for_one_more_perturbed_run():
    """Oracle: mean + t(0.99, n-1) sd sqrt(1 + 1/n) of the largest late gaps, by scipy; and it holds for 99 % of new runs."""
    base = flat()
    eps = with_gap(base, lambda s: ar1(s, 2e-3))
    noise = pair(eps, base)
    peaks = np.abs(relative_gap(noise, noise.gap))[:, STEPS // 2 :].max(axis=1)
    bound = peaks.mean() + scipy.stats.t.ppf(0.99, 4) * peaks.std(ddof=1) * math.sqrt(1.2)
    assert noise_limit(noise) == (pytest.approx(bound), 5)


def test_a_spike_that_heals_counts_as_leaving_and_one_at_the_end_as_not_settled():
    base, t = flat(), np.arange(STEPS)
    spiked = with_gap(base, np.where((t >= 150) & (t < 156), 0.2, 0.0))
    found = settle(spiked, base)
    d = 0.5 ** (1 / 20)
    top = 0.2 * (1 - d**6)
    healed = 155 + math.floor(math.log(0.0025 * LOSS / top) / math.log(d)) + 1
    assert set(found.steps.values()) == {float(healed)}
    assert settle(with_gap(base, np.where(t >= 290, 1.0, 0.0)), base).unsettled == 5


@pytest.mark.parametrize(
    ("seeds", "steps", "words"), [(2, STEPS, "2 seeds have a pair"), (5, 40, "40 logged")]
)
def test_too_few_runs_or_steps_are_no_figure(seeds, steps, words):
    base = flat(seeds=range(seeds), steps=steps)
    found = settle(base, base)
    assert found.problem.startswith(words)
    assert found.sentence.startswith("could not tell")
    assert math.isnan(found.step)
    assert math.isnan(found.interval[2])


def test_a_run_that_met_nan_is_not_settled_and_one_whose_control_did_is_left_out():
    base = flat()
    broken = with_gap(base, np.zeros(STEPS))
    broken[3] = dataclasses.replace(broken[3], nonfinite_step=250)
    found = settle(broken, base)
    assert found.unsettled == 1
    assert math.isinf(found.steps[3])
    assert 3 not in settle(broken, broken).steps


def test_after_a_switch_steps_count_from_it():
    base, t = flat(), np.arange(STEPS)
    gap = np.where(t >= 100, 0.1 * np.exp(-(t - 100) / 20), 0.0)
    found = settle(with_gap(base, gap), base, start=100)
    d, r = 0.5 ** (1 / 20), math.exp(-1 / 20)
    u = np.arange(200.0)
    smooth = 0.1 * (1 - d) * (r ** (u + 1) - d ** (u + 1)) / (r - d)  # the average is 0 until the switch
    expected = np.flatnonzero(smooth > 0.0025 * LOSS)[-1] + 1
    assert set(found.steps.values()) == {float(expected)}
    assert "after the switch at step 100" in found.sentence
    assert found.logged == 200


# On stored rows


def test_arms_with_fp8_carry_the_figure_with_the_noise_of_their_recipe(tmp_path):
    base = control()
    fp8 = shifted(base, lambda t: 0.05 * np.exp(-t / 30), sd=1e-5)
    rows = rows_of_runs("base", base) + rows_of_runs("base_eps", shifted(base, 0.0, sd=1e-5))
    rows += rows_of_runs("tensorwise", fp8) + rows_of_runs("tensorwise_eps", shifted(fp8, sd=2e-4))
    rows += rows_of_runs("rowwise", fp8)
    found = {v.arm: v.verdict.settled for v in judge(frame(tmp_path, rows))}
    assert (found["base_eps"], found["tensorwise_eps"]) == (None, None)
    assert (found["tensorwise"].noise_runs, found["rowwise"].noise_runs) == (5, 0)
    assert 0 < found["rowwise"].step < found["tensorwise"].step < STEPS
    text = "\n".join(lines(judge(frame(tmp_path / "again", rows))))
    assert found["tensorwise"].sentence in text


@pytest.mark.parametrize("n", [1, 2, 4, 5, 7, 8, 20])
def test_the_median_interval_is_the_narrowest_that_covers_nine_tenths(n):
    low, high, coverage = median_interval([float(i) for i in range(1, n + 1)])
    k = int(low)
    assert high == n + 1 - k
    assert coverage == pytest.approx(1 - 2 * scipy.stats.binom.cdf(k - 1, n, 0.5))
    assert coverage >= 0.9 or k == 1
    assert 1 - 2 * scipy.stats.binom.cdf(k, n, 0.5) < 0.9  # one rank further inside covers too little


# Time to a loss


BASE = control()


def _bare(runs):
    return {s: Run(r.loss, planned_steps=STEPS) for s, r in runs.items()}


def test_crossing_agrees_with_a_line():
    curve = Curve.of([4.0, 3.0, 1.0], [0, 10, 30])
    assert crossing(curve, 2.0) == 20.0
    assert crossing(curve, 4.0) == crossing(curve, 5.0) == 0.0
    assert math.isnan(crossing(curve, 0.5))


def linear_run(step_s: float, slope: float = 0.01, steps: int = 101) -> Run:
    """Held-out loss 3 - slope t, every ten steps."""
    t = np.arange(0, steps, 10, dtype=float)
    return Run(
        Curve.of(3 - slope * np.arange(steps)),
        heldout=Curve(t, 3 - slope * t),
        elapsed=Curve.of(step_s * (1 + np.arange(steps))),
    )


def test_time_to_loss_of_straight_lines():
    """Oracle: 3 - 0.01 t reaches 2.45 after 55 updates, which take 55 steps' time; half of it where a step takes half."""
    arms = {"base": {s: linear_run(0.2) for s in range(3)}, "fast": {s: linear_run(0.1) for s in range(3)}}
    base, fast = time_to_loss(arms, target=2.45)
    assert list(base.steps.values()) == pytest.approx([55.0] * 3)
    assert list(fast.seconds.values()) == pytest.approx([5.5] * 3)
    assert fast.step_ratio.value == pytest.approx(1.0)
    assert fast.second_ratio.value == pytest.approx(2.0)
    assert base.step_ratio is None
    assert base.curve == "held-out loss"


@pytest.mark.parametrize("reached", [0, 10, 55])
def test_a_held_out_loss_after_r_updates_costs_the_time_of_r_steps(reached):
    """Oracle: steps of unequal length by hand: the first takes 5 s (it compiles), each later one 0.1 s."""
    run = dataclasses.replace(linear_run(0.1), elapsed=Curve.of(5 + 0.1 * np.arange(101)))
    (base,) = time_to_loss({"base": {0: run}}, target=3 - 0.01 * reached + 1e-12)
    assert base.steps[0] == pytest.approx(reached)
    assert base.seconds[0] == pytest.approx(5 + 0.1 * (reached - 1) if reached else 0.0)


def test_a_training_loss_at_s_costs_the_time_until_that_step_ended():
    """Oracle: a smoothed constant crosses at once, and the first step has ended after 5 s."""
    run = Run(Curve.of(np.full(101, 2.0)), elapsed=Curve.of(5 + 0.1 * np.arange(101)))
    (base,) = time_to_loss({"base": {0: run}}, target=2.5)
    assert (base.steps[0], base.seconds[0]) == (0.0, 5.0)


def test_the_default_target_is_reached_by_every_control_run():
    arms = {"base": {0: linear_run(0.2), 1: linear_run(0.2, slope=0.008)}}
    (base,) = time_to_loss(arms)
    assert base.target == pytest.approx(2.2 * 1.0025)
    assert base.reached == 2


def test_not_reached_is_a_result_and_has_no_ratio():
    arms = {"base": {s: linear_run(0.2) for s in range(3)}}
    arms["slow"] = {s: linear_run(0.2, slope=0.01 if s else 0.001) for s in range(3)}
    slow = time_to_loss(arms, target=2.45)[1]
    assert math.isnan(slow.steps[0])
    assert slow.reached == 2
    assert slow.step_ratio is None


def test_without_held_out_curves_the_smoothed_training_loss_counts():
    (base, worse) = time_to_loss({"base": _bare(BASE), "worse": _bare(shifted(BASE, 0.3))})
    assert base.curve == "smoothed training loss"
    assert base.reached == 5
    assert worse.reached == 0
    assert all(math.isnan(s) for s in base.seconds.values())


def test_time_to_loss_without_a_control_or_a_target_is_refused_or_empty():
    assert time_to_loss({"tensorwise": BASE}) == []
    with pytest.raises(ValueError, match="must be a finite loss"):
        time_to_loss({"base": BASE}, target=math.inf)


def test_a_run_that_broke_counts_up_to_its_nan():
    loss = BASE[0].loss.values.copy()
    loss[50:] = math.nan
    broken = {0: Run(Curve.of(loss), planned_steps=STEPS)}
    at_once = {0: Run(Curve.of(np.full(60, math.nan)))}
    reach = time_to_loss({"base": _bare({0: BASE[0]}), "broken": broken, "at_once": at_once})
    assert [r.reached for r in reach] == [1, 0, 0]
