"""Ways to a PASS where it is false, each with its honest twin. Oracle: what was planted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from curves_for_tests import STEPS, control, gate, shifted

from harness.judge.verdict import Curve, Run, judge_pairs

BASE = control()


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


@pytest.mark.parametrize(("seeds", "hit"), [(8, 1), (16, 2), (60, 1)])
def test_runs_that_diverge_at_the_end_do_not_pass_however_many_others_there_are(seeds, hit):
    base = control(range(seeds))
    runs = with_losses(shifted(base), bump(250, None, 2.0, range(hit)))
    assert judge_pairs(runs, base).outcome != "PASS"
    both = with_losses(base, bump(250, None, 2.0, range(hit)))
    assert judge_pairs(with_losses(shifted(both), lambda s, v: v), both).outcome != "FAIL"


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
    ones = np.ones(STEPS)
    zero = ones.copy()
    zero[17] = 0.0
    candidate = with_fp8_norms(shifted(BASE), lambda s: 2 * ones)
    assert (
        gate(judge_pairs(candidate, BASE, golden=with_fp8_norms(shifted(BASE), lambda s: ones)), "L6").status
        == "FAIL"
    )
    broken = gate(judge_pairs(candidate, BASE, golden=with_fp8_norms(shifted(BASE), lambda s: zero)), "L6")
    assert broken.status == "INCONCLUSIVE"


def test_nan_in_the_norm_of_the_fp8_layers_is_a_nan():
    ones = np.ones(STEPS)
    nan = ones.copy()
    nan[7] = np.nan
    verdict = judge_pairs(with_fp8_norms(shifted(BASE), lambda s: nan if s == 1 else ones), BASE)
    assert gate(verdict, "L1").status == "FAIL"
    assert "seed 1 at step 7" in gate(verdict, "L1").sentence


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
