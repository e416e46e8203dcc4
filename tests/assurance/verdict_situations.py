"""Situations of the loss verdict: curves that cannot show that FP8 trains as bf16 does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from curves_for_tests import STEPS, control, rows_of_runs, run_of, shifted
from report_fixtures import write_run
from situations import Place, situation

from harness import store
from harness.judge import verdict
from harness.store.proof import FIELD

if TYPE_CHECKING:
    from harness.judge.verdict import Run
    from harness.store.measurement import Measurement

of_verdict = partial(
    situation, "sweep=divergence", word="Verdict.outcome", positive="PASS", instead="INCONCLUSIVE"
)
Runs = dict[int, "Run"]


def outcome(place: Place, rows: list[Measurement], arm: str = "tensorwise") -> str:
    """The stored rows' verdict on one arm."""
    write_run(place.folder / "run", [rows])
    found = {v.arm: v.verdict.outcome for v in verdict.judge(store.read(place.folder))}
    return str(found[arm])


def judged(place: Place, mine: Runs, base: Runs | None = None, **resolved: object) -> str:
    base = control() if base is None else base
    return outcome(place, rows_of_runs("base", base) + rows_of_runs("tensorwise", mine, **resolved))


@of_verdict(what="every loss of FP8 is the control's: nothing was converted")
def equals_control(place: Place, planted: bool) -> object:
    base = control()
    return judged(place, base if planted else shifted(base))


@of_verdict(what="in one of five seeds every loss is the control's")
def equals_control_in_one_seed(place: Place, planted: bool) -> object:
    base = control()
    mine = shifted(base)
    return judged(place, {**mine, 2: base[2]} if planted else mine)


@of_verdict(what="every loss is the golden emulation's: FP8 was emulated")
def equals_golden(place: Place, planted: bool) -> object:
    base = control()
    mine = shifted(base)
    golden = mine if planted else shifted(base, 0.0001)
    rows = rows_of_runs("base", base) + rows_of_runs("tensorwise", mine, emulated=planted)
    return outcome(place, rows + rows_of_runs("tensorwise_golden", golden))


@of_verdict(what="`base_eps`, the control that must pass, was not perturbed")
def unperturbed(place: Place, planted: bool) -> object:
    base = control()
    rows = rows_of_runs("base", base)
    return outcome(
        place, rows + rows_of_runs("base_eps", base if planted else shifted(base, sd=1e-5)), "base_eps"
    )


@of_verdict(what="`base_other`, the control of other seeds, ran the same seeds")
def no_other_seeds(place: Place, planted: bool) -> object:
    base = control()
    other = base if planted else {s: control([100 + s])[100 + s] for s in base}
    return outcome(place, rows_of_runs("base", base) + rows_of_runs("base_other", other), "base_other")


@of_verdict(what="the control's loss does not fall: learning rate 0")
def nothing_learned(place: Place, planted: bool) -> object:
    base = control()
    if planted:
        draws = {s: np.random.default_rng(s).normal(0, 0.01, STEPS) for s in base}
        base = {s: run_of(4.17 + noise) for s, noise in draws.items()}
    return judged(place, shifted(base), base)


@of_verdict(what="seeds 1 to 4 are copies of seed 0")
def copied_seeds(place: Place, planted: bool) -> object:
    base = control()
    mine = shifted(base)
    if planted:
        base, mine = (dict.fromkeys(range(5), runs[0]) for runs in (base, mine))
    return judged(place, mine, base)


@of_verdict(what="two seeds ran")
def two_seeds(place: Place, planted: bool) -> object:
    base = control(range(2 if planted else 5))
    return judged(place, shifted(base), base)


@of_verdict(what="the runs are 40 steps long")
def forty_steps(place: Place, planted: bool) -> object:
    base = control(steps=40 if planted else STEPS)
    return judged(place, shifted(base), base)


@of_verdict(what="FP8 and control become NaN in the same step")
def nan_on_both_sides(place: Place, planted: bool) -> object:
    base = control()
    mine = shifted(base)
    if planted:
        for runs in (base, mine):
            for run in runs.values():
                run.loss.values[200:] = np.nan
        base, mine = (
            {s: replace(r, loss=type(r.loss).of(r.loss.values)) for s, r in runs.items()}
            for runs in (base, mine)
        )
    return judged(place, mine, base)


@situation(
    "sweep=divergence",
    "the loss of one FP8 run becomes NaN",
    word="Verdict.outcome",
    positive="PASS",
    instead="FAIL",
)
def nan_tail(place: Place, planted: bool) -> object:
    mine = shifted(control())
    if planted:
        values = mine[1].loss.values.copy()
        values[290:] = np.nan
        mine[1] = replace(mine[1], loss=type(mine[1].loss).of(values))
    return judged(place, mine)


@of_verdict(what="no held-out loss was stored")
def no_heldout(place: Place, planted: bool) -> object:
    mine = shifted(control())
    return judged(place, {s: replace(r, heldout=None) for s, r in mine.items()} if planted else mine)


@of_verdict(what="an FP8 run is missing: the process died")
def missing_seed(place: Place, planted: bool) -> object:
    mine = shifted(control())
    if planted:
        del mine[3]
    return judged(place, mine)


@of_verdict(what="`fp8core.verify` disproved FP8 at the start of the runs")
def disproved(place: Place, planted: bool) -> object:
    said = {FIELD: "disproved" if planted else "proved", "verify": "a line"}
    return judged(place, shifted(control()), **said)


@of_verdict(what="`fp8core.verify` could not compare all of the step")
def unproven(place: Place, planted: bool) -> object:
    said = {FIELD: "unproven" if planted else "proved", "verify": "a line"}
    return judged(place, shifted(control()), **said)


@of_verdict(what="no row says that `fp8core.verify` was asked")
def unasked(place: Place, planted: bool) -> object:
    return judged(place, shifted(control()), verify="" if planted else "FP8 verified: 9 of 9")


@of_verdict(what="the negative control passes: this set-up sees no fault")
def negative_control_passes(place: Place, planted: bool) -> object:
    base = control()
    broken = shifted(base, 0.0001 if planted else 0.6)
    rows = rows_of_runs("base", base) + rows_of_runs("tensorwise", shifted(base))
    return outcome(place, rows + rows_of_runs("negative_control", broken))


@of_verdict(what="a warm-up that never switches: FP8 never ran")
def warm_up_without_end(place: Place, planted: bool) -> object:
    base = control()
    switch = STEPS if planted else STEPS // 5
    warm = shifted(base, lambda t: np.where(t < switch, 0.0, 0.0004))
    for seed, run in warm.items():
        same = run.loss.steps < switch
        run.loss.values[same] = base[seed].loss.values[same]
        warm[seed] = replace(run, grad_norm=base[seed].grad_norm, switch_step=switch)
    rows = rows_of_runs("base", base) + rows_of_runs("base_to_tensorwise", warm)
    return outcome(place, rows, "base_to_tensorwise")
