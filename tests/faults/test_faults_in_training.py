"""Faults planted around real training runs: of the verdict's gates the one that the catalogue names in advance catches it.

Oracle: the catalogue's own prediction, and runs without a fault, of which no gate fails. The runs are those of the
divergence suite (model nano, fp32, weights and batches of the seed); the golden arm is the recipe without the fault.
Here they are as short as the verdict judges at all. What every fault does to every gate in longer runs is the table
of reports/published/studies/loss-verdict-faults.md, printed by

    python tests/faults/test_faults_in_training.py SEEDS STEPS [NAME ...]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

import pytest
from fault_catalogue import FAULTS, Fault

from fp8core import RECIPES, Recipe
from harness.judge.verdict import Curve, Run, Verdict, judge_pairs
from harness.store.case import Case
from harness.store.measurement import proof_outcome
from harness.suites import divergence
from harness.training import meta_estimate
from harness.training.loop import train

if TYPE_CHECKING:
    from fp8core.recipe import Kernels

GATES = {"not finite": {"L1"}, "early loss": {"L3"}, "late loss": {"L4", "L4h"}, "gradient": {"L6"}}
# These fail their gate only in runs of the table's batch or length.
TABLE_ONLY = (
    "no scaling", "amax of half a block", "one direction's codes for both", "fused cast: rows for columns",
    "transposed tile off by one", "stale amax",
)  # fmt: skip
SEEN = [name for name, fault in FAULTS.items() if fault.gate in GATES and name not in TABLE_ONLY]
FAST = ("scale inverted", "scale four times too large", "amax without magnitude", "gradients unscaled")

Runs = dict[int, Run]


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is trained."""

    seeds: int
    steps: int
    batch: int = 8
    seq: int = 64
    eval_batches: int = 16
    accumulation: int = 1
    lr_warmup: int = 10
    model: str = "nano"


SHORT = Size(seeds=3, steps=52, batch=4, seq=32, eval_batches=2)
LOOK = Size(seeds=1, steps=2, batch=4, seq=32, eval_batches=1, lr_warmup=1)


def trained(
    recipe: Recipe | None,
    size: Size,
    planted: AbstractContextManager[None] | None = None,
    arm: str = "base",
    left_out: tuple[str, ...] = (),
) -> Runs:
    """The arm's run of each seed, its layers converted to the recipe but for those left out."""
    runs = {}
    with planted or nullcontext():
        for seed in range(size.seeds):
            axes = dataclasses.asdict(size)
            del axes["seeds"]
            axes |= {"seed": seed, "eval_every": 0, "diagnose_every": 0}
            (point,) = divergence.points([], {name: [value] for name, value in axes.items()}, None)
            job = divergence.job_of(Case.of("divergence", point | axes), arm, "cpu")
            job.setup = dataclasses.replace(job.setup, recipe=recipe, left_out=left_out)
            result = train(job, "cpu")
            curves = {
                metric: Curve.of([value for _, value in points], [step for step, _ in points])
                for (metric, _), points in result.curves.points.items()
            }
            runs[seed] = Run(
                curves["loss"],
                curves.get("heldout_loss"),
                curves.get("grad_norm"),
                planned_steps=size.steps,
                nonfinite_step=result.nonfinite_step,
                stopped=result.stopped,
                tokens_per_step=meta_estimate.tokens(job.setup),
                proof=str(result.facts.get("verify", "")),
                proof_outcome=proof_outcome(result.facts),
                fp8_grad_norm=curves.get("fp8_grad_norm"),
            )
    return runs


def recipe_of(name: str, kernels: Kernels = "auto") -> Recipe:
    """The recipe, emulated where no CPU multiplies it."""
    recipe = RECIPES[name].with_kernels(kernels)
    return recipe.emulated() if name in ("blockwise", "mxfp8") else recipe


@cache
def control(size: Size) -> Runs:
    return trained(None, size)


@cache
def correct(name: str, size: Size) -> Runs:
    """Curves of a recipe, or of the perturbed control."""
    if name == "base_eps":
        return trained(None, size, arm=name)
    return trained(recipe_of(name), size)


@cache
def golden(name: str, size: Size) -> Runs:
    recipe = recipe_of(name)
    return (
        trained(recipe.with_backend("reference_bf16"), size)
        if recipe.backend == "torch"
        else correct(name, size)
    )


def verdict_on(runs: Runs, name: str, size: Size) -> Verdict:
    return judge_pairs(runs, control(size), golden=golden(name, size) if name in RECIPES else None)


def faulty(fault: Fault, size: Size) -> Runs:
    return trained(recipe_of(fault.recipe, fault.kernels), size, fault.planted())


def same(runs: Runs, others: Runs) -> bool:
    """Whether the losses are bitwise equal."""
    return all((runs[seed].loss.values == others[seed].loss.values).all() for seed in others)


def failed(verdict: Verdict) -> set[str]:
    return {result.gate for result in verdict.gates if result.status == "FAIL"}


def caught(verdict: Verdict) -> set[str]:
    """Gates that fail, and the course, which withholds PASS and never fails."""
    return {r.gate for r in verdict.gates if r.status == "FAIL" or (r.gate == "L3" and r.status != "PASS")}


@pytest.mark.parametrize("name", ["base_eps", "tensorwise", "rowwise"])
def test_no_gate_fails_without_a_fault(name: str) -> None:
    verdict = verdict_on(correct(name, SHORT), name, SHORT)
    assert not failed(verdict), verdict.reasons


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in SEEN]
)
def test_the_named_gate_catches_the_fault(name: str) -> None:
    fault = FAULTS[name]
    verdict = verdict_on(faulty(fault, SHORT), fault.recipe, SHORT)
    assert caught(verdict) & GATES[fault.gate], verdict.gates
    assert verdict.outcome != "PASS"


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.gate == "refused"])
def test_a_refused_fault_trains_no_step(name: str) -> None:
    with pytest.raises(ValueError, match=r"scale|kernel"):
        faulty(FAULTS[name], LOOK)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.gate == "verify"])
def test_the_proof_of_its_first_step_catches_what_no_curve_shows(name: str) -> None:
    fault = FAULTS[name]
    (run,) = faulty(fault, LOOK).values()
    assert run.disproved, run.proof
    (right,) = correct(fault.recipe, LOOK).values()
    assert not right.disproved
    assert right.proof


def table(size: Size, names: Sequence[str] = ()) -> None:
    """Prints the table of reports/published/studies/loss-verdict-faults.md, each line as soon as it is known; of the faults named, or of all.

    Faults of state take more than one microbatch: the same sequences of a step, in two.
    """
    print(
        "| planted | recipe | named in advance | verdict, and the gates that did not pass | L3 | L4 | L4h | L6 |"
    )
    print("| --- | --- | --- | --- | ---: | ---: | ---: | ---: |")
    for name in () if names else ("base_eps", "tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"):
        print(_line("nothing", name, "PASS", verdict_on(correct(name, size), name, size)), flush=True)
    chosen = [FAULTS[name] for name in names] or sorted(
        FAULTS.values(), key=lambda fault: fault.gate not in GATES
    )
    for fault in chosen:
        kind = fault.recipe + (", fused" if fault.kernels == "always" else "")
        its_size = size
        if fault.gate == "state":
            its_size = dataclasses.replace(size, batch=size.batch // 2, accumulation=2)
            kind += ", 2 microbatches"
        try:
            runs = faulty(fault, its_size)
        except ValueError as error:
            cells = fault.name, kind, fault.gate, f"refused: {str(error).splitlines()[0]}", *"----"
            print("| " + " | ".join(cells) + " |", flush=True)
            continue
        line = _line(fault.name, kind, fault.gate, verdict_on(runs, fault.recipe, its_size))
        if any(run.disproved for run in runs.values()):
            line += " disproved by verify"
        for others, whose in (
            (control(its_size), "the control"),
            (correct(fault.recipe, its_size), "the recipe"),
        ):
            if same(runs, others):
                line += f" bitwise equal to {whose}"
        print(line, flush=True)


def _line(what: str, recipe: str, gate: str, verdict: Verdict) -> str:
    gates = {result.gate: result for result in verdict.gates}
    seen = [
        name if r.status == "FAIL" else f"{name} {r.status}"
        for name, r in gates.items()
        if r.status != "PASS"
    ]
    said = verdict.outcome + (": " + ", ".join(seen) if seen else "")
    effects = [f"{100 * gates[name].effect:+.3f}" for name in ("L3", "L4", "L4h")]
    return "| " + " | ".join([what, recipe, gate, said, *effects, f"{gates['L6'].effect:.3f}"]) + " |"


if __name__ == "__main__":
    table(Size(*map(int, sys.argv[1:3])), sys.argv[3:])
