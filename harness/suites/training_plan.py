"""Training plan: requests that can come to nothing, refused before anything trains.

Runs that no verdict can be made of, seeds out of range, copies of one run, and arms in which FP8 never runs or a precision
never switches.
"""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fp8core import PrecisionSchedule
from harness.store.errors import UsageError
from harness.store.loss_limits import MIN_POINTS, MIN_SEEDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

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


def refuse_same_schedules(cases: Iterable[Case]) -> None:
    """Refuse two schedules that hold the same layers at the same steps: both would be the same run.

    Raises:
        UsageError: names both texts and the steps.
    """
    texts: dict[object, str] = {}
    for case in cases:
        text, steps = case.text("schedule"), case.integer("steps")
        rules = PrecisionSchedule.parse(text).rules
        held = frozenset((rule.kind, rule.length(steps), rule.pattern, rule.gemms) for rule in rules)
        other = texts.setdefault((tuple(pair for pair in case.axes if pair[0] != "schedule"), held), text)
        if other != text:
            raise UsageError(
                f"axes.schedule: {other} and {text} are the same in a run of {steps} steps; give one"
            )


def refuse_seeds(cases: Iterable[Case], limit: int) -> None:
    """Refuse a seed from which no batch is drawn, or that is kept for the arm of another seed.

    Args:
        cases: whose seed is the sum of the request's and that of the axis.
        limit: the first seed that is refused.

    Raises:
        UsageError: names the seed and the range.
    """
    for case in cases:
        seed = case.seed + case.integer("seed")
        if not 0 <= seed < limit:
            raise UsageError(
                f"seed={case.seed}, axes.seed={case.integer('seed')}: trains from seed {seed}; expected a sum from 0 to "
                f"{limit - 1}"
            )


def refuse_without_verdict(
    runs: Mapping[Case, Collection[str]], control: str, without_heldout: Collection[str]
) -> None:
    """Refuse runs to be judged that lack what every verdict needs: their control, or a held-out loss.

    Args:
        runs: as for `refuse_too_few`.
        control: the arm that the others are held against.
        without_heldout: arms whose outcome needs no held-out loss, the control among them.

    Raises:
        UsageError: names the key, what is lacking, and how to have the curves alone.
    """
    for case, arms in runs.items():
        if arms and control not in arms:
            raise UsageError(
                f"arms=[{','.join(sorted(arms))}]: no run of {control}, so there is nothing to judge them against; add "
                f"{control} to arms, or {CURVES_ALONE}"
            )
        if case.integer("eval_batches") == 0 and not set(arms).issubset(without_heldout):
            raise UsageError(
                f"axes.eval_batches=0: no verdict can be PASS without a held-out loss; give at least 1, or {CURVES_ALONE}"
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
