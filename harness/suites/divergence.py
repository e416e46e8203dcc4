"""Suite `divergence`: does FP8 train as its control does? Each arm of a case is one training run; its rows are curves.

All arms of a case start from the same weights and read the same batches, those of the axis `seed`; the seeds are cases
of their own. What is compared with what, and by which rule, is the verdict's affair (`harness.judge.verdict`).

    base                 the control: no FP8
    base_eps             its weights x (1 + 1e-4 N(0, 1)): the numeric noise floor
    base_other           other weights and other batches: the spread between seeds
    RECIPE               FP8 from the first step to the last; the axis `schedule` applies to it
    RECIPE_eps           perturbed likewise: the noise floor of FP8
    RECIPE_golden        the same casts, multiplied in high precision
    RECIPE_only_input    the same, of which only this operand is cast (also only_weight, only_grad_output)
    RECIPE_only_output   the same, of which only this GEMM is (also only_grad_input, only_grad_weight)
    RECIPE_e5m2_gradients, RECIPE_e4m3_gradients   the same with gradients in the format that the recipe does not take
    RECIPE_nearest, RECIPE_no_hadamard, RECIPE_1x16_weight   four bits without one of their knobs
    base_to_RECIPE       without FP8 for the first fifth of the steps
    RECIPE_to_base       without FP8 for the last fifth
    negative_control     a broken recipe that must fail: gradients in e4m3 without a scale, where most become zero

With `ranks` above 1 a run trains on so many processes, over which FSDP2 shards the model: `batch` is a rank's.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from fp8core import RECIPES, Float8Linear, PrecisionSchedule
from fp8core.distributed.weight_gather import recipe_reason
from fp8core.history import mark_ready
from fp8core.recipe import Cast, Gemm, Recipe
from harness.machine import ranks
from harness.store.case import ABLATIONS, COOLDOWN, EPS, GOLDEN, NEGATIVE, OTHER, WARMUP, Arm, expand
from harness.store.errors import Cause, UsageError
from harness.store.loss_limits import MIN_POINTS, MIN_SEEDS
from harness.suites import ablation, axes_of
from harness.suites.common import crossed_points, ranks_of, recipe_unsupported
from harness.suites.extended import extended_table
from harness.timing.device_memory import free_bytes
from harness.timing.workload import ArmInfo, TrialOutcome, Unsupported
from harness.training import batches, meta_estimate
from harness.training.loop import Batch, TrainingJob, TrainingRegime, facts_of, train
from harness.training.setup import EXPERTS, Setup, Trainee
from harness.training.step import CHECKPOINTING, COMPUTE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from fp8core.recipe import Recipe
    from harness.store.case import Case, Scalar
    from harness.suites.shapes import Point


CURVES_ALONE = "train.judge=false stores the curves without a verdict"


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


BASE = "base"
PHASE = 0.2  # of the steps, in the arms that change precision
OTHER_SEEDS = 1_000_000  # added to the seed of base_other; a sweep asks for smaller ones alone
WITHOUT_HELDOUT = (BASE, f"{BASE}_{OTHER}", NEGATIVE)  # arms that no held-out loss has to pass
HELDOUT_STEP = 2**31  # held-out batches of a user's model are those of steps that no training reaches

AXES = axes_of("divergence", compute=COMPUTE, checkpointing=CHECKPOINTING, experts=EXPERTS)


def _arms() -> dict[str, ArmInfo]:
    arms = {
        Arm(BASE): ArmInfo("the control, without FP8"),
        Arm(BASE, variant=EPS): ArmInfo("control, weights perturbed by 1e-4", BASE),
        Arm(BASE, variant=OTHER): ArmInfo("control, another seed", BASE),
    }
    for name, recipe in RECIPES.items():
        arms |= {
            Arm(name): ArmInfo(f"recipe {name}", BASE, name),
            Arm(name, variant=EPS): ArmInfo(f"recipe {name}, weights perturbed by 1e-4", name, name),
            Arm(name, variant=WARMUP): ArmInfo(f"control for a fifth of the steps, then {name}", BASE, name),
            Arm(name, variant=COOLDOWN): ArmInfo(
                f"{name}, then control for a fifth of the steps", BASE, name
            ),
        }
        if recipe != recipe.emulated():
            arms[Arm(name, variant=GOLDEN)] = ArmInfo(f"recipe {name}, emulated", BASE, name)
        arms |= {
            Arm(name, variant=part): ArmInfo(f"recipe {name}, emulated: {part.replace('_', ' ')}", BASE, name)
            for part in ABLATIONS
            if ablation.applies(recipe, part)
        }
    negative = ArmInfo("e4m3 gradients without a scale: must fail", BASE, "any")
    return extended_table({**arms, Arm(variant=NEGATIVE): negative}, RECIPES)


ARMS: Mapping[str, ArmInfo] = _arms()

# A static cast whose amax is the format's largest value scales by one.
_TENSORWISE = RECIPES["tensorwise"]
assert _TENSORWISE.output.a is not None
_E4M3 = _TENSORWISE.output.a.format
_UNSCALED = Cast(_E4M3, scaling="static")
UNSCALED = replace(
    _TENSORWISE,
    name="tensorwise-e4m3_grad_unscaled",
    grad_input=Gemm(_UNSCALED, _TENSORWISE.grad_input.b),
    grad_weight=Gemm(_UNSCALED, _TENSORWISE.grad_weight.b),
)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Kernels and token counts of the arm's recipe, layers, or memory that is predicted not to be there.

    Raises:
        UsageError: a rule of the schedule fits no FP8 layer of the model, or FP8 would never run.
    """
    setup = setup_of(case, arm)
    why = recipe_unsupported(setup.recipe, setup.batch * setup.seq, device)
    if (world := ranks_of(case)) == 1:
        why = why or meta_estimate.unsupported(setup, device, free_bytes(device))
    elif missing := ranks.gpus_missing(world, device):
        return Unsupported("device", missing)
    elif setup.recipe is not None and setup.recipe.fp8_all_gather and (lacks := recipe_reason(setup.recipe)):
        return Unsupported("shape", f"fp8_all_gather=true: {lacks}; take axes.fp8_all_gather=false")
    schedule = schedule_of(case, arm)
    if setup.experts == "fp8" and schedule.rules:
        return Unsupported(
            "shape", "a precision schedule holds nn.Linear layers back, not experts; take experts=hp"
        )
    if why is None and schedule.rules and setup.recipe is not None:
        layers = meta_estimate.fp8_layers(setup)
        try:
            schedule.check_patterns(layers)
        except ValueError as error:
            raise UsageError(f"schedule: {error}") from error
        refuse_schedule(arm, schedule, setup.recipe, layers, case.integer("steps"))
    return why


def check_request(runs: Mapping[Case, Collection[str]], judged: bool) -> None:
    """Refuse a whole request by its seeds, or with too little for its verdict (`harness.timing.workload.check_request`).

    Raises:
        UsageError: a seed from which no batch is drawn, or that is kept for the arm of another seed; of runs to be judged: no
            control, no held-out loss where some arm needs it, fewer steps or seeds than judging takes.
    """
    seeds: defaultdict[object, list[int]] = defaultdict(list)
    for case, arms in runs.items():
        seed, steps = case.seed + case.integer("seed"), case.integer("steps")
        if not 0 <= seed < OTHER_SEEDS:
            raise UsageError(
                f"seed={case.seed}, axes.seed={case['seed']}: trains from seed {seed}; expected a sum from 0 to "
                f"{OTHER_SEEDS - 1}"
            )
        if not judged or not arms:
            continue
        if BASE not in arms:
            raise UsageError(
                f"arms=[{','.join(sorted(arms))}]: no run of {BASE}, so there is nothing to judge them against; add "
                f"{BASE} to arms, or {CURVES_ALONE}"
            )
        if case.integer("eval_batches") == 0 and not set(arms).issubset(WITHOUT_HELDOUT):
            raise UsageError(
                f"axes.eval_batches=0: no verdict can be PASS without a held-out loss; give at least 1, or {CURVES_ALONE}"
            )
        compared = set(arms) - {BASE}
        if compared and steps < MIN_POINTS:
            raise UsageError(
                f"axes.steps={steps}: judging takes at least {MIN_POINTS} logged steps; give more, or {CURVES_ALONE}"
            )
        setup = tuple(pair for pair in case.axes if pair[0] != "seed")
        for arm in compared:
            seeds[setup, case.seed, arm].append(case.integer("seed"))
    for values in seeds.values():
        if len(values) < MIN_SEEDS:
            raise UsageError(
                f"axes.seed={values}: {len(values)} seed{'s' * (len(values) > 1)}, judging takes at least {MIN_SEEDS} "
                f"(5 are the default); give more, or {CURVES_ALONE}"
            )


def work(case: Case) -> float:
    """Tokens of a run."""
    return float(
        math.prod(case.integer(axis) for axis in ("batch", "seq", "accumulation", "steps"))
    ) * ranks_of(case)


def trial(
    case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]
) -> TrialOutcome:
    """Train one arm; every loss is a result."""
    job, world = job_of(case, arm, device), ranks_of(case)
    result = train(job, device, workspace, on_step)
    resolved: dict[str, object] = {
        **facts_of(job.setup, job.regime, job.schedule),
        **_data_facts(case, device),
        **result.facts,
        "timed": "optimizer steps, the wait for the device after each included",
        "nonfinite_step": result.nonfinite_step,
        "stopped": result.stopped,
        "perturbed": 1e-4 if job.perturb else 0.0,
        "threads": 1 if device == "cpu" else None,
    }
    if world > 1:
        resolved |= {"ranks": world, "tokens_per_step": world * meta_estimate.tokens(job.setup)}
    series = result.curves.series()
    lost = "" if any(s.metric == "loss" for s in series) else f"nothing was trained: {result.stopped}"
    broke = Cause.ERROR if result.nonfinite_step is None else Cause.DIVERGED
    return TrialOutcome(series, resolved, lost, cause=broke)


def recipe_of(arm: str) -> Recipe | None:
    """What the layers of an arm are converted to."""
    if arm == NEGATIVE:
        return UNSCALED
    name = ARMS[arm].recipe
    if not name:
        return None
    recipe, variant = RECIPES[name], ARMS[arm].arm.variant
    if variant == GOLDEN:  # with the roundings of the real one, so that both can have the same codes
        return recipe.with_backend("reference_bf16" if recipe.backend == "torch" else "reference")
    return ablation.recipe_of(recipe, variant) if variant in ABLATIONS else recipe


def schedule_of(case: Case, arm: str) -> PrecisionSchedule:
    """Precision schedule of an arm's layers."""
    variant = ARMS[arm].arm.variant
    if variant in (WARMUP, COOLDOWN):
        return PrecisionSchedule.parse(f"{variant}_bf16:{PHASE}")
    return PrecisionSchedule.parse(case.text("schedule") if ARMS[arm].recipe in RECIPES else "")


def setup_of(case: Case, arm: str) -> Setup:
    """What an arm of a case trains."""
    other = OTHER_SEEDS if ARMS[arm].arm.variant == OTHER else 0
    setup = batches.setup_of(
        case,
        batch=case.integer("batch"),
        recipe=_gathering(case, recipe_of(arm)),
        experts=str(dict(case.axes).get("experts", "hp")) if ARMS[arm].recipe in RECIPES else "hp",
        seed=case.seed + case.integer("seed") + other,
        lr=case.number("lr"),
        betas=(case.number("beta1"), case.number("beta2")),
        weight_decay=case.number("weight_decay"),
        grad_clip=case.number("grad_clip") or float("inf"),  # inf: measured, not clipped
    )
    is_emulated = ARMS[arm].arm.variant in (GOLDEN, *ABLATIONS)
    return (
        replace(setup, left_out=_not_for_kernels(setup, RECIPES[ARMS[arm].recipe])) if is_emulated else setup
    )


def _not_for_kernels(setup: Setup, recipe: Recipe) -> tuple[str, ...]:
    """Layers that the recipe's own kernels refuse by their sizes: an emulation that rounded them would be another model."""
    try:
        taken = set(meta_estimate.fp8_layers(replace(setup, recipe=recipe)))
    except (UsageError, ValueError):  # it converts nothing, which the plan tells of the recipe's own arm
        return ()
    return tuple(name for name in meta_estimate.fp8_layers(setup) if name not in taken)


def _gathering(case: Case, recipe: Recipe | None) -> Recipe | None:
    return recipe.with_fp8_all_gather() if recipe and dict(case.axes).get("fp8_all_gather") else recipe


def job_of(case: Case, arm: str, device: str) -> TrainingJob:
    """The run that an arm of a case is."""
    setup, text = setup_of(case, arm), batches.text_of(case)
    size = setup.accumulation, setup.batch, setup.seq
    return TrainingJob(
        setup=setup,
        regime=regime_of(case),
        batches=lambda step: batches.microbatches_of(setup.model, text, step, setup.seed, size, device),
        heldout=_heldout(case, device),
        schedule=schedule_of(case, arm),
        perturb=ARMS[arm].arm.variant == EPS,
        alter=scale_by_one if arm == NEGATIVE else ablation.alteration(ARMS[arm].arm.variant),
        identity=f"{case.case_id} {arm}" + (f" {text.sha256}" if text is not None else ""),
        ranks=ranks_of(case),
    )


def regime_of(case: Case) -> TrainingRegime:
    """Steps, learning rates and looks of a case."""
    lr = case.number("lr")
    return TrainingRegime(
        steps=case.integer("steps"),
        lr=lr,
        min_lr=lr * case.number("min_lr_frac"),
        warmup=case.integer("lr_warmup"),
        eval_every=case.integer("eval_every"),
        diagnose_every=case.integer("diagnose_every"),
    )


def scale_by_one(trainee: Trainee) -> None:
    """Makes every static cast of a model leave its tensor unscaled."""
    for layer in trainee.model.modules():
        if isinstance(layer, Float8Linear) and layer.amaxes is not None:
            layer.amaxes.in_use.fill_(_E4M3.max)
            mark_ready(layer.amaxes)


def _heldout(case: Case, device: str) -> list[Batch]:
    """The batches of the held-out loss: the same for every arm and seed."""
    count, batch, text = case.integer("eval_batches"), case.integer("batch"), batches.text_of(case)
    if not count:
        return []
    if text is not None:
        return list(text.heldout_batches(count, batch, case.integer("seq"), device))
    size = 1, batch, case.integer("seq")
    steps = range(HELDOUT_STEP, HELDOUT_STEP + count)
    return [m for s in steps for m in batches.microbatches_of(case.text("model"), None, s, 0, size, device)]


def _data_facts(case: Case, device: str) -> dict[str, object]:
    text, windows = batches.text_of(case), case.integer("eval_batches") * case.integer("batch")
    if text is None:
        own = meta_estimate.facts_of_calls(setup_of(case, BASE), device)
        return own | {"heldout": f"batches of steps from {HELDOUT_STEP} on"}
    return {
        "data": text.name,
        "data_sha256": text.sha256,
        "vocab_size": text.vocab_size,
        "heldout": f"{windows} fixed windows, evenly spread over the last tenth of the text",
    }


def _check(case: Case) -> None:
    """Everything about a case that can be refused without building its model."""
    regime_of(case)
    try:
        PrecisionSchedule.parse(case.text("schedule"))
    except ValueError as error:
        raise UsageError(str(error)) from error
    for name in ("beta1", "beta2"):
        if case.number(name) >= 1:
            raise UsageError(f"{name}={case.number(name):g}: expected a number below 1")
    model, data, path = (case.text(axis) for axis in ("model", "data", "data_path"))
    seq, world = case.integer("seq"), ranks_of(case)
    if world > 1 and case.integer("eval_batches") % world:
        raise UsageError(
            f"eval_batches={case['eval_batches']}: ranks={world} share them, expected a multiple of that"
        )
    refused = {"diagnose_every": 0, "experts": "hp"} if world > 1 else {"fp8_all_gather": False}
    for name, only in refused.items():
        if dict(case.axes).get(name, only) != only:
            raise UsageError(f"{name}={case[name]} with ranks={world}: expected {only}")
    batches.check(model, data, path, seq, case.integer("layers"), case.integer("batch"), judged=True)
    text = batches.corpus_of_case(case)
    if text is not None and text.heldout <= seq and case.integer("eval_batches"):
        raise UsageError(f"data={data}: the held-out part has {text.heldout} tokens, seq={seq} needs more")


_points = crossed_points("divergence", "whole models by axes.model", AXES, check=_check)


def points(shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any) -> list[Point]:
    """Points of `crossed_points`, each of which is a run of its own.

    Raises:
        UsageError: a value stands twice, or two schedules hold the same layers at the same steps.
        ValueError: as there.
    """
    for axis, values in axes.items():
        for value, count in Counter(values).items():
            if count > 1:
                given = ",".join(map(str, values))
                raise UsageError(
                    f"axes.{axis}=[{given}]: {value} stands {count} times; each value makes one run, so give each once"
                )
    found = _points(shapes, axes, model)
    texts: dict[object, str] = {}
    for case in expand("divergence", axes, found):
        text, steps = case.text("schedule"), case.integer("steps")
        rules = PrecisionSchedule.parse(text).rules
        held = frozenset((rule.kind, rule.length(steps), rule.pattern, rule.gemms) for rule in rules)
        other = texts.setdefault((tuple(pair for pair in case.axes if pair[0] != "schedule"), held), text)
        if other != text:
            raise UsageError(
                f"axes.schedule: {other} and {text} are the same in a run of {steps} steps; give one"
            )
    return found
