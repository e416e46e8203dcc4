"""Training plan: requests that can come to nothing, refused before anything trains.

Too few seeds or steps for a verdict, copies of one run, and arms in which FP8 never runs or a precision never switches.
"""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from harness.store.errors import UsageError
from harness.store.loss_limits import MIN_POINTS, MIN_SEEDS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from fp8core import PrecisionSchedule
    from fp8core.recipe import Recipe
    from harness.store.case import Case, Scalar

CURVES_ALONE = "train.judge=false stores the curves without a verdict"


def refuse_copies(axes: Mapping[str, Sequence[Scalar]]) -> None:
    """Refuse an axis with a value twice: both would be the same run.

    Raises:
        UsageError: names the axis and the value.
    """
    for axis, values in axes.items():
        for value, count in Counter(values).items():
            if count > 1:
                given = ",".join(map(str, values))
                raise UsageError(
                    f"axes.{axis}=[{given}]: {value} stands {count} times; each value makes one run, so give each once"
                )


def refuse_too_few(runs: Mapping[Case, Collection[str]], control: str) -> None:
    """Refuse set-ups with arms to be judged and fewer seeds or steps than judging needs.

    Args:
        runs: the arms that run, by case; those of all shards.
        control: the arm that is not judged itself.

    Raises:
        UsageError: names the axis, what judging needs, and how to have the curves alone.
    """
    seeds: dict[object, list[int]] = {}
    for case, arms in runs.items():
        judged = sorted(set(arms) - {control})
        steps = case.integer("steps")
        if judged and steps < MIN_POINTS:
            raise UsageError(
                f"axes.steps={steps}: judging takes at least {MIN_POINTS} logged steps; give more, or {CURVES_ALONE}"
            )
        setup = tuple(pair for pair in case.axes if pair[0] != "seed")
        for arm in judged:
            seeds.setdefault((setup, case.seed, arm), []).append(case.integer("seed"))
    for values in seeds.values():
        if len(values) < MIN_SEEDS:
            given = ",".join(map(str, values))
            raise UsageError(
                f"axes.seed=[{given}]: {len(values)} seed{'s' * (len(values) > 1)}, judging takes at least {MIN_SEEDS} "
                f"(5 are the default); give more, or {CURVES_ALONE}"
            )


def refuse_schedule(
    arm: str, schedule: PrecisionSchedule, recipe: Recipe, layers: Collection[str], steps: int
) -> None:
    """Refuse an arm whose schedule leaves FP8 no step, or switches at none.

    Args:
        arm: its name.
        schedule: its rules.
        recipe: of its layers.
        layers: names of its FP8 layers.
        steps: of the run.

    Raises:
        UsageError: names arm, schedule and rule.
    """
    named = f"arm {arm}, schedule {schedule}"
    try:
        schedule.switch_steps(steps)
    except ValueError as error:
        raise UsageError(f"{named}: {error}") from error
    for rule in schedule.rules:
        if isinstance(rule.amount, float) and rule.length(steps) == 0:
            raise UsageError(
                f"{named}: {rule} rounds to 0 of the run's {steps} steps and does nothing; give a longer share, or more steps"
            )
    if not _runs_fp8(schedule, recipe, layers, steps):
        raise UsageError(
            f"{named}: every FP8 layer is held in high precision at each of the run's {steps} steps, so FP8 never runs; "
            "shorten or narrow a rule, or leave the arm out"
        )


def _runs_fp8(schedule: PrecisionSchedule, recipe: Recipe, layers: Collection[str], steps: int) -> bool:
    """Whether some GEMM of some layer runs in FP8 at some step."""
    gemms = [name for name, gemm in recipe.gemms.items() if gemm.a is not None]
    for step in (0, *schedule.switch_steps(steps)):
        in_force = [rule for rule in schedule.rules if rule.holds(step, steps)]
        for layer in layers:
            held = {g for rule in in_force if fnmatchcase(layer, rule.pattern) for g in rule.gemms}
            if not held.issuperset(gemms):
                return True
    return False
