"""Verdicts on precision patterns and on other seeds. Oracle: curves made with a known gap, bitwise twins, counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from curves_for_tests import control, falling, gate, run_of, shifted, with_loss

from harness.judge.verdict import Curve, Run, judge_other_seeds, judge_pairs

BASE = control()


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
    assert np.median(cool[0].grad_norm.values / BASE[0].grad_norm.values) == 1
    verdict = judge_pairs(cool, BASE, twin=fp8)
    assert gate(verdict, "L6").status == "FAIL"
    assert gate(verdict, "L6").effect == pytest.approx(0.8)
    assert gate(verdict, "L3").sentence.startswith("steps 0 to 59")


def test_a_span_without_a_logged_step_cannot_tell():
    fp8 = shifted(BASE)
    verdict = judge_pairs(switched(shifted(BASE), fp8, 0), BASE, twin=fp8)
    assert [gate(verdict, name).status for name in ("L3", "L6")] == ["INCONCLUSIVE"] * 2
    assert "0 logged steps ran in FP8" in gate(verdict, "L3").sentence


def test_a_pattern_whose_twin_lacks_a_seed_cannot_pass():
    fewer = {s: r for s, r in BASE.items() if s != 3}
    verdict = judge_pairs(switched(shifted(BASE), BASE, 60), BASE, twin=fewer, twin_name="base")
    assert gate(verdict, "prefix").sentence == "no run of base for seed 3"
    assert verdict.outcome == "INCONCLUSIVE"


# Other seeds


def test_other_seeds_pass_the_wide_band_and_a_worse_arm_does_not():
    other = {s: run_of(falling(50 + s)) for s in range(5)}
    assert judge_other_seeds(other, BASE).outcome == "PASS"
    worse = {s: run_of(falling(50 + s) + 0.3) for s in range(5)}
    assert judge_other_seeds(worse, BASE).outcome == "FAIL"
    assert judge_other_seeds(other, {0: BASE[0]}).outcome == "INCONCLUSIVE"
    fewer = judge_other_seeds({s: r for s, r in other.items() if s}, BASE)
    assert (fewer.outcome, fewer.notes) == ("INCONCLUSIVE", ("no run for seed 0",))


def test_the_wide_band_lets_through_about_one_correct_set_in_a_hundred():
    """Oracle: the level of the interval, 99 % for all five runs together; 400 draws of both sides."""
    generator = np.random.default_rng(3)
    failed = 0
    for _ in range(400):
        levels = generator.normal(2.1, 0.008, 10)
        runs = [Run(Curve.of(np.full(60, level))) for level in levels]
        verdict = judge_other_seeds(dict(enumerate(runs[:5])), dict(enumerate(runs[5:])))
        failed += gate(verdict, "band").status == "FAIL"
    assert failed <= 12  # a binomial of 400 draws at 1 % exceeds 12 in 0.03 % of all cases


def test_a_pattern_without_its_twin_cannot_pass():
    verdict = judge_pairs(switched(shifted(BASE), BASE, 60), BASE, twin_name="tensorwise")
    assert gate(verdict, "prefix").status == "INCONCLUSIVE"
    assert verdict.outcome == "INCONCLUSIVE"
