"""Sections: the parts of a machine's report in reading order, each from what the rows hold; empty ones fall away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.report import (
    charts,
    compared,
    compatibility,
    compile_break_even,
    gathers,
    league,
    libraries,
    links,
    loss_cost,
    numerics,
    predicted_and_measured,
    roofline,
    scaling,
    steps,
    tables,
    targets,
    tradeoff,
    training,
    training_charts,
    trials,
    utilization,
    verdicts,
)
from harness.report.heatmap import heat_maps
from harness.report.section import Section
from harness.store import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.drawing import Chart
    from harness.report.runs import Machine, Material
    from harness.report.table import Grid, Table

PLACED = (
    "linear",
    "gemm",
    "cast",
    "ceilings",
    "recipes",
    "outliers",
    "train",
    "divergence",
    "parallel",
    "allgather",
    "links",
    "scale",
    "ab",
)


def sections(machine: Machine, first: str = "") -> tuple[Section, ...]:
    """All sections of a machine that have something to show, the one named `first` before all, folded ones last."""
    found = [*_judgement(machine), *_speed(machine), *_suites(machine), *_rest(machine)]
    lead = f"{first}-{machine.env_id}"
    return tuple(sorted((s for s in found if not s.empty), key=lambda s: (s.folded, s.key != lead)))


def shared(material: Material) -> tuple[Section, ...]:
    """What several machines have in common, which stands before each of them alone."""
    both = Section(
        "machines",
        "Machines compared",
        "Each machine's own ratio of FP8 to bf16, side by side; times of two machines are not set against each other.",
        first=compared.across_machines(material),
        charts=compared.machines_chart(material),
    )
    return () if both.empty else (both,)


def _judgement(machine: Machine) -> list[Section]:
    key = machine.env_id
    return [
        Section(
            f"findings-{key}",
            "Findings",
            "Faults that these rows show, with the likely cause and a remedy.",
            first=[training.findings_table(machine)],
        ),
        Section(
            f"divergence-{key}",
            "Does it train the same",
            "Runs of a seed share weights and batches, so gaps are paired. PASS: every gate passed or warned. FAIL: some gate "
            "failed. Anything else is undecided by these runs. A CPU's losses count: they are numerics, not times.",
            first=[training.verdict_table(machine)] if machine.verdicts else [],
            charts=[*loss_cost.cost_charts(machine), *training_charts.losses(machine)],
            tables=[
                loss_cost.cost_table(machine),
                training.reach_table(machine),
                training.layers_table(machine),
            ]
            if machine.trainings
            else [],
        ),
        Section(
            f"parallel-{key}",
            "What runs in parallel with what",
            compatibility.INTRO,
            first=[compatibility.matrix(machine), compatibility.reasons(machine)],
            tables=[compatibility.sent(machine)],
        ),
        Section(
            f"allgather-{key}",
            "Weights gathered in FP8",
            gathers.INTRO,
            first=[gathers.gathers_table(machine)],
        ),
        Section(
            f"gates-{key}",
            "Every gate in words",
            "Effect, interval, seeds and margin of each gate of the loss verdict.",
            tables=[training.gates_table(machine)] if machine.verdicts else [],
            folded=True,
        ),
    ]


def _speed(machine: Machine) -> list[Section]:
    key, cpu = machine.env_id, not machine.is_gpu
    label = _label(machine)
    commits = compared.across_commits(machine)
    maps = heat_maps(machine, "linear")
    return [
        Section(
            f"bars-{key}",
            "What a training step is asked for",
            "Judged on the largest timed model: two arms of one run, in the same rounds.",
            first=[targets.bars_table(machine)],
        ),
        Section(
            f"speed-{key}",
            f"{label}FP8 against bf16",
            "Each pair is one case, timed in the same rounds; eager against eager, compile against compile."
            + (" Maps: speedup of whole layers by tokens M, inputs K and outputs N." if maps else ""),
            first=[verdicts.gains(machine)],
            charts=[*charts.speedups(machine), *tradeoff.speed_against_error(machine)],
            grids=maps,
            folded=cpu,
        ),
        Section(
            f"league-{key}",
            f"{label}League of implementations",
            "Other implementations and fp8core on the same operands, scales and rounds; arms that compute the same are paired.",
            first=[league.league_table(machine)],
            folded=cpu,
        ),
        Section(f"commits-{key}", "Commits compared", first=[commits] if commits else []),
        Section(
            f"squares-{key}",
            f"{label}Eager and compile, bf16 and FP8",
            "Forward and backward of one layer in ms. Speedups are against bf16 in the same column.",
            grids=tables.squares(machine),
            folded=cpu,
        ),
        Section(
            f"numerics-{key}",
            "Numerical quality",
            "Every arm is checked against a high-precision reference before timing; a wrong one is not timed.",
            charts=charts.soundness(machine),
            tables=[numerics.numerics_table(machine)],
        ),
        Section(
            f"train-{key}",
            f"{label}Training steps",
            "One optimizer step: forward, backward, update. Each ratio is against the bf16 arm that was run the same way.",
            first=[steps.advised_table(machine)],
            charts=steps.breakdown(machine),
            tables=[
                *steps.steps_tables(machine),
                utilization.mfu_table(machine),
                steps.traces_table(machine),
            ],
            folded=cpu,
        ),
    ]


def _suites(machine: Machine) -> list[Section]:
    cpu, key, label = not machine.is_gpu, machine.env_id, _label(machine)

    def suite(
        name: str,
        title: str,
        intro: str,
        figures: Sequence[Chart] = (),
        grids: Sequence[Grid] = (),
        numeric: bool = False,
        first: Sequence[Table] = (),
    ) -> Section:
        """`numeric`: a suite whose figures mean the same on a CPU, and which therefore is not folded there."""
        found = [tables.suite_table(machine, name)] if name in machine.suites else []
        heading, folded = (title, False) if numeric else (label + title, cpu)
        return Section(f"{name}-{key}", heading, intro, first, figures, grids, found, folded)

    return [
        suite("linear", "Layers", "All arms of the layer cases."),
        suite(
            "gemm",
            "GEMMs by role",
            "D = A @ B with A [M, K] and B [K, N]. Maps: speedup over bf16 by M, K and N.",
            [*charts.rates(machine), *roofline.roofline(machine)],
            heat_maps(machine, "gemm"),
            first=[libraries.chosen_table(machine)],
        ),
        suite("cast", "Casts", "From high precision to FP8, scales included.", charts.casts(machine)),
        suite("ceilings", "Ceilings", "The best rates of this device, for comparison with the other tables."),
        suite(
            "recipes",
            "Recipes",
            "One layer; bytes an element are what fused casts must move and what is kept for the backward pass."
            + (" Times are a CPU's." if cpu else ""),
            numeric=True,
        ),
        suite(
            "outliers",
            "Where each recipe breaks",
            "Casts alone, products summed in float64. Outliers dominate the SQNR of the whole result; the bulk is the rest. "
            "Times are the emulation's.",
            tradeoff.outliers(machine),
            numeric=True,
        ),
        links.section(machine),
        Section(
            f"job-{key}",
            f"{label}The job, predicted and measured",
            predicted_and_measured.INTRO,
            first=[predicted_and_measured.job_table(machine)],
        ),
        Section(
            f"scale-{key}",
            "Beyond this machine",
            "Predicted, not measured: bytes from the shapes of the parameters, time by published or measured rates "
            "(docs/scale-accuracy.md compares it with published throughputs).",
            tables=[scaling.scale_table(machine)] if "scale" in machine.suites else [],
        ),
        Section(
            f"trials-{key}",
            "FP8 against bf16 in a user's own training loop",
            "Blocks of steps alternate within one run of the loop (harness.ab): what each trial answered."
            + (" Times are a CPU's and decide nothing." if cpu else ""),
            first=[trials.answers(machine)],
        ),
        suite("ab", "Arms of the trials", "base: the loop without FP8, timed twice a round."),
        *(suite(name, name.capitalize(), "") for name in machine.suites if name not in PLACED),
    ]


def _rest(machine: Machine) -> list[Section]:
    key, cpu = machine.env_id, not machine.is_gpu
    every = tables.every_row(machine)
    whole = len(every.rows) + every.left_out
    of_parts = len(machine.frame) - whole
    return [
        Section(
            f"compile-{key}",
            "Compile time",
            "First call of each compiled arm. No other time of this report includes it.",
            charts=[] if cpu else compile_break_even.break_even(machine),
            tables=[tables.compile_times(machine)],
            folded=cpu,
        ),
        Section(
            f"troubles-{key}",
            "Failed and skipped",
            "A wrong or missing result is a row with its reason, never a gap.",
            tables=[tables.troubles(machine)],
        ),
        Section(
            f"rows-{key}",
            f"Every stored row ({whole:,})",
            "Medians and quartiles of all samples, none trimmed; the samples themselves are in the Parquet files."
            + (f" So are {text.plural(of_parts, 'row')} of layers and kernel classes." if of_parts else ""),
            tables=[every],
            folded=True,
            in_markdown=False,
        ),
    ]


def _label(machine: Machine) -> str:
    # On a CPU times are kept, folded and labelled, since they check the harness and nothing else.
    return "" if machine.is_gpu else "CPU times: "
