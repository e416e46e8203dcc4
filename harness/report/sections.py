"""Sections: the parts of a machine's report in reading order. A section of a suite is entered where the suite was measured;
one that has nothing to show falls away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.report import (
    charts,
    compared,
    compatibility,
    gathers,
    league,
    loss_cost,
    numerics,
    outliers,
    roofline,
    scaling,
    steps,
    tables,
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
    from collections.abc import Callable, Mapping, Sequence

    from harness.report.drawing import Chart
    from harness.report.runs import Machine, Material

_ELSEWHERE = (
    "train",
    "divergence",
    compatibility.SUITE,
    gathers.SUITE,
)  # suites whose section stands higher up
_NUMERIC = ("recipes", "outliers")  # their figures mean the same on a CPU: not folded there
_PREDICTED = (
    "Predicted, not measured: bytes from the shapes of the parameters, time by published or measured rates "
    "(docs/scale.md compares it with published throughputs)."
)
_TRIALS = "Blocks of steps alternate within one run of the loop (harness.ab): what each trial answered."
# In this order, with title, introduction and figures; suites that are not named follow.
_SUITES: Mapping[str, tuple[str, str, Sequence[Callable[[Machine], Sequence[Chart]]]]] = {
    "linear": ("Layers", "All arms of the layer cases.", ()),
    "gemm": (
        "GEMMs by role",
        "D = A @ B with A [M, K] and B [K, N]. Maps: speedup over bf16 by M, K and N.",
        (charts.rates, roofline.roofline),
    ),
    "cast": ("Casts", "From high precision to FP8, scales included.", (charts.casts,)),
    "ceilings": ("Ceilings", "The best rates of this device, for comparison with the other tables.", ()),
    "recipes": (
        "Recipes",
        "One layer; bytes an element are what fused casts must move and what is kept for the backward pass.",
        (),
    ),
    "outliers": (
        "Where each recipe breaks",
        "Casts alone, products summed in float64. Outliers dominate the SQNR of the whole result; the bulk is the rest. "
        "Times are the emulation's.",
        (outliers.outliers,),
    ),
    "scale": ("", "", ()),
    "ab": ("Arms of the trials", "base: the loop without FP8, timed twice a round.", ()),
}


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
    )
    return () if both.empty else (both,)


def _judgement(machine: Machine) -> list[Section]:
    key, has = machine.env_id, machine.suites
    found = [
        Section(
            f"findings-{key}",
            "Findings",
            "Faults that these rows show, with the likely cause and a remedy.",
            first=[training.findings_table(machine)],
        )
    ]
    if "divergence" in has:
        found += [
            Section(
                f"divergence-{key}",
                "Does it train the same",
                "Runs of a seed share weights and batches, so gaps are paired. PASS: every gate passed or warned. FAIL: some gate "
                "failed. Anything else is undecided by these runs. A CPU's losses count: they are numerics, not times.",
                first=[training.verdict_table(machine)],
                charts=[*loss_cost.cost_charts(machine), *training_charts.losses(machine)],
                tables=[
                    loss_cost.cost_table(machine),
                    training.reach_table(machine),
                    training.layers_table(machine),
                ],
            ),
            Section(
                f"gates-{key}",
                "Every gate in words",
                "Effect, interval, seeds and margin of each gate of the loss verdict.",
                tables=[training.gates_table(machine)],
                folded=True,
            ),
        ]
    if compatibility.SUITE in has:
        first = [compatibility.matrix(machine), compatibility.reasons(machine)]
        title = "What runs in parallel with what"
        found.append(Section(f"parallel-{key}", title, compatibility.INTRO, first=first))
    if gathers.SUITE in has:
        first = [gathers.gathers_table(machine)]
        found.append(Section(f"allgather-{key}", "Weights gathered in FP8", gathers.INTRO, first=first))
    return found


def _speed(machine: Machine) -> list[Section]:
    key, cpu, has = machine.env_id, not machine.is_gpu, machine.suites
    label = _label(machine)
    maps = heat_maps(machine, "linear") if "linear" in has else []
    found = [
        Section(
            f"speed-{key}",
            f"{label}FP8 against bf16",
            "Each pair is one case, timed in the same rounds; eager against eager, compile against compile."
            + (" Maps: speedup of whole layers by tokens M, inputs K and outputs N." if maps else ""),
            first=[verdicts.gains(machine)],
            charts=charts.speedups(machine),
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
    ]
    if "linear" in has:
        found.append(
            Section(
                f"squares-{key}",
                f"{label}Eager and compile, bf16 and FP8",
                "Forward and backward of one layer in ms. Speedups are against bf16 in the same column.",
                grids=tables.squares(machine),
                folded=cpu,
            )
        )
    found.append(
        Section(
            f"numerics-{key}",
            "Numerical quality",
            "Every arm is checked against a high-precision reference before timing; a wrong one is not timed.",
            charts=charts.soundness(machine),
            tables=[numerics.numerics_table(machine)],
        )
    )
    if "train" in has:
        found.append(
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
            )
        )
    return found


def _suites(machine: Machine) -> list[Section]:
    """A section a suite that was measured: its table, with the figures that it has."""
    cpu, key, label = not machine.is_gpu, machine.env_id, _label(machine)
    found = []
    for name in sorted(machine.suites, key=lambda name: [*_SUITES, name].index(name)):
        if name in _ELSEWHERE:
            continue
        if name == "scale":
            tables_of = [scaling.scale_table(machine)]
            found.append(Section(f"scale-{key}", "Beyond this machine", _PREDICTED, tables=tables_of))
            continue
        if name == "ab":
            intro = _TRIALS + (" Times are a CPU's and decide nothing." if cpu else "")
            title = "FP8 against bf16 in a user's own training loop"
            found.append(Section(f"trials-{key}", title, intro, first=[trials.answers(machine)]))
        title, intro, figures = _SUITES.get(name, (name.capitalize(), "", ()))
        numeric = name in _NUMERIC
        if name == "recipes" and cpu:
            intro += " Times are a CPU's."
        found.append(
            Section(
                f"{name}-{key}",
                title if numeric else label + title,
                intro,
                charts=[chart for draw in figures for chart in draw(machine)],
                grids=heat_maps(machine, name) if name == "gemm" else [],
                tables=[tables.suite_table(machine, name)],
                folded=cpu and not numeric,
            )
        )
    return found


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
