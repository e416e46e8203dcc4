"""Situations of the loss verdict: curves that cannot show that FP8 trains as bf16 does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from curves_for_tests import STEPS, control, falling, rows_of_runs, run_of, shifted
from report_fixtures import write_run
from situations import Place, situation

from harness import store
from harness.judge import verdict
from harness.store.measurement import FIELD, LAYERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.judge.verdict import Curve, Run
    from harness.store.measurement import Measurement

of_verdict = partial(
    situation, "sweep=divergence", word="Verdict.outcome", positive="PASS", instead="INCONCLUSIVE"
)
Runs = dict[int, "Run"]
Pair = tuple[Runs, Runs]


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
        for mine, theirs in ((run.loss, base[seed].loss), (run.grad_norm, base[seed].grad_norm)):
            assert mine is not None
            assert theirs is not None
            mine.values[same] = theirs.values[same]
        warm[seed] = replace(run, switch_step=switch)
    rows = rows_of_runs("base", base) + rows_of_runs("base_to_tensorwise", warm)
    return outcome(place, rows, "base_to_tensorwise")


def changed(curve: Curve | None, change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Curve:
    """The curve with `change(steps, values)` for its values."""
    assert curve is not None
    return type(curve).of(change(curve.steps, curve.values.copy()), curve.steps)


def with_curve(runs: Runs, name: str, change: Callable[[int, np.ndarray, np.ndarray], np.ndarray]) -> Runs:
    return {s: replace(r, **{name: changed(getattr(r, name), partial(change, s))}) for s, r in runs.items()}


def swinging(size: Callable[[np.ndarray], np.ndarray], period: float) -> Callable[[Runs, Runs], Pair]:
    """The candidate's losses swing around what they were; their mean over a period stays."""

    def plant(mine: Runs, base: Runs) -> Pair:
        def swing(seed: int, t: np.ndarray, values: np.ndarray) -> np.ndarray:
            return values + size(t) * np.sin(2 * np.pi * (t / period + seed / 5))

        return with_curve(mine, "loss", swing), base

    return plant


@of_verdict(
    what="its slow swings are smaller than the noise of a step, and larger than that of a moving average"
)
def slow_swings(place: Place, planted: bool) -> object:
    base = {s: run_of(falling(s, noise=0.1)) for s in range(5)}
    mine = shifted(base)
    return judged(place, swinging(lambda t: 0.06 + 0 * t, 60)(mine, base)[0] if planted else mine, base)


def repeated(name: str, share: float = 0.0) -> Callable[[Runs, Runs], Pair]:
    """A curve of the candidate is the control's from this share of the steps on."""

    def plant(mine: Runs, base: Runs) -> Pair:
        def copy(seed: int, t: np.ndarray, values: np.ndarray) -> np.ndarray:
            return np.where(t >= share * STEPS, getattr(base[seed], name).values, values)

        return with_curve(mine, name, copy), base

    return plant


def both(
    name: str, change: Callable[[int, np.ndarray, np.ndarray], np.ndarray]
) -> Callable[[Runs, Runs], Pair]:
    """A curve of both arms is changed alike."""
    return lambda mine, base: (with_curve(mine, name, change), with_curve(base, name, change))


def near_copies(mine: Runs, base: Runs) -> Pair:
    mine, base = (
        {s: with_curve({s: runs[0]}, "loss", lambda s, t, v: v + s * 1e-6)[s] for s in runs}
        for runs in (mine, base)
    )
    return with_curve(
        mine, "loss", lambda s, t, v: v + 1e-5 * np.random.default_rng(s).normal(size=t.size)
    ), base


def worse_at_a_hundred(mine: Runs, base: Runs) -> Pair:
    plus = [
        (runs, name, size) for name in ("loss", "heldout") for runs, size in ((mine, 100.2), (base, 100.0))
    ]
    for runs, name, size in plus:
        runs |= with_curve(runs, name, lambda s, t, v, size=size: v + size)
    return mine, base


def still(name: str, value: float) -> Callable[[Runs, Runs], Pair]:
    """A curve of both arms never changes; the arms' values are near one another, so that only their standing still shows."""

    def plant(mine: Runs, base: Runs) -> Pair:
        return (
            with_curve(mine, name, lambda s, t, v: 0 * v + value * 1.0001),
            with_curve(base, name, lambda s, t, v: 0 * v + value),
        )

    return plant


def with_noise(size: float) -> Callable[[Runs, Runs], Pair]:
    """The candidate's losses are the control's, plus noise of this size in nats."""
    noisy = lambda s, t, v: v + size * np.random.default_rng(s).normal(size=t.size)  # noqa: E731
    return lambda mine, base: (
        {s: replace(r, loss=with_curve(base, "loss", noisy)[s].loss) for s, r in mine.items()},
        base,
    )


def heldout_swings(mine: Runs, base: Runs) -> Pair:
    def swing(seed: int, at: np.ndarray, values: np.ndarray) -> np.ndarray:
        return values + np.append(0.05 * (-1.0) ** np.arange(at.size - 1), 0.0)

    return with_curve(mine, "heldout", swing), base


def jump_of_the_control(mine: Runs, base: Runs) -> Pair:
    return mine, with_curve(base, "loss", lambda s, t, v: v + 3.0 * ((t >= 200) & (s == 2)))


def given(**fields: object) -> Callable[[Runs, Runs], Pair]:
    """The candidate's runs say this of themselves."""
    return lambda mine, base: ({s: replace(r, **fields) for s, r in mine.items()}, base)


for name, what, plant in (
    ("swings", "FP8's loss swings by 0.3 nats around the control's, with the same mean", swinging(lambda t: 0.3 + 0 * t, 5)),
    ("growing_swings", "the swings grow to 0.6 nats", swinging(lambda t: 0.6 * t / STEPS, 5)),
    ("repeated_heldout", "the held-out losses are the control's bit for bit", repeated("heldout")),
    ("repeated_tail", "the last 40 % of the losses are the control's bit for bit", repeated("loss", 0.6)),
    ("repeated_norms", "the gradient norms are the control's bit for bit", repeated("grad_norm")),
    ("near_copies", "the seeds are seed 0 plus 1e-6", near_copies),
    ("tokens", "a step of FP8 has twice the control's tokens", given(tokens_per_step=1024.0)),
    ("hardly_falls", "the control's loss falls by 1 %", both("loss", lambda s, t, v: 2.1 + (v - 2.1) / 60)),
    ("clipped_norms", "gradient norms were logged after clipping: all are about 1", still("grad_norm", 1.0)),
    ("barely_differs", "FP8's losses are the control's plus 1e-5", with_noise(1e-5)),
    ("swinging_heldout", "the held-out losses swing by 0.05 nats, and end right", heldout_swings),
    ("broken_control_seed", "the control of one seed jumps by 3 nats", jump_of_the_control),
    ("frozen_heldout", "the held-out loss never changes", still("heldout", 2.1)),
):  # fmt: skip

    def plant_curves(place: Place, planted: bool, plant: Callable[[Runs, Runs], Pair] = plant) -> object:
        base = control()
        mine = shifted(base)
        return judged(place, *(plant(mine, base) if planted else (mine, base)))

    plant_curves.__name__ = name
    of_verdict(what=what)(plant_curves)


@situation(
    "sweep=divergence",
    "both losses are 100 higher, and FP8 is 0.2 nats worse",
    word="Verdict.outcome",
    positive="PASS",
    instead="FAIL",
)
def far_from_0(place: Place, planted: bool) -> object:
    base = control()
    mine = shifted(base)
    return judged(place, *(worse_at_a_hundred(mine, base) if planted else (mine, base)))


CONVERTED = [f"layers.{i}" for i in range(40)]
READ = {"0": "aa", "299": "bb", "heldout": "cc"}
for name, what, said in (
    (
        "proof_of_one_layer",
        "the proof is of one of the 40 layers that were converted",
        {LAYERS: {"tensorwise": 1}},
    ),
    ("proof_of_few_gemms", "the proof counted 3 GEMMs in 40 layers", {"fp8_gemms": 3}),
    ("proof_of_another_recipe", "the proof is of another recipe", {LAYERS: {"rowwise": 40}}),
    (
        "proof_without_layers",
        "the proof is of another recipe, and the row lists no layers",
        {"fp8_layers": None, LAYERS: {"rowwise": 40}},
    ),
    ("other_torch", "FP8 was trained by another torch than the control", {"torch": "1.0"}),
    ("other_length", "FP8 read sequences of another length than the control", {"seq": 128}),
    ("other_optimizer", "FP8 was trained by another optimizer than the control", {"optimizer": "SGD"}),
    ("unknown_batches", "what FP8 read is stored, what the control read is not", {"batches": READ}),
):

    def plant_facts(place: Place, planted: bool, said: dict[str, object] = said) -> object:
        whole = {"recipe": "tensorwise", "fp8_layers": CONVERTED, LAYERS: {"tensorwise": 40}}
        return judged(place, shifted(control()), **whole | (said if planted else {}))

    plant_facts.__name__ = name
    of_verdict(what=what)(plant_facts)
