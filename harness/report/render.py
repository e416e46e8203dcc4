"""Render: machines and runs into one HTML file and its markdown twin."""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from itables.utils import find_package_file

from harness.report import charts, numerics, steps, tables, text, training, training_charts, verdicts
from harness.report.facts import conditions, facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.drawing import Chart
    from harness.report.runs import Machine, Material
    from harness.report.table import Table

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a machine's report: a short table, then figures, squares and the long tables."""

    key: str
    title: str
    intro: str = ""
    first: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    squares: Sequence[tuple[str, Table]] = ()
    tables: Sequence[Table] = ()
    folded: bool = False
    in_markdown: bool = True

    @property
    def all_tables(self) -> tuple[Table, ...]:
        """Short and long tables that have rows."""
        return tuple(t for t in (*self.first, *self.tables) if t.rows)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.charts or self.squares or self.all_tables)


@dataclass(frozen=True, slots=True)
class MachineView:
    """What the templates know about one machine."""

    env_id: str
    name: str
    conditions: str
    notice: str
    answers: tuple[verdicts.Answer, ...]
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str], ...]


def render(material: Material, static: bool) -> tuple[str, str]:
    """The report as (HTML, markdown); the same input gives the same bytes.

    Args:
        material: what to show.
        static: leave out the JavaScript; tables then neither sort nor filter.
    """
    views = [_view(machine) for machine in material.machines]
    unfinished = [f"Run {run.run_id} {run.state_note}." for run in material.runs if run.state_note]
    common = {
        "title": views[0].name if len(views) == 1 else f"{len(views)} machines",
        "subtitle": views[0].conditions if len(views) == 1 else _dates(material),
        "machines": views,
        "notices": [*unfinished, *material.problems],
        "runs": material.runs,
        "problems": material.problems,
    }
    environment = _jinja()
    html = environment.get_template("page.html.j2").render(
        **common, css=(HERE / "page.css").read_text(), **({} if static else _interactive())
    )
    return html, environment.get_template("page.md.j2").render(**common)


def _view(machine: Machine) -> MachineView:
    return MachineView(
        machine.env_id,
        machine.name,
        conditions(machine),
        "" if machine.is_gpu else verdicts.CPU_NOTICE,
        (*verdicts.answers(machine), *([training.trains_the_same(machine)] if machine.trainings else [])),
        tuple(sorted((s for s in _sections(machine) if not s.empty), key=lambda s: s.folded)),
        facts(machine),
    )


def _sections(machine: Machine) -> list[Section]:
    suites = list(dict.fromkeys(machine.frame["suite"]))
    # On a CPU times are kept, folded and labelled, since they check the harness and nothing else.
    cpu = not machine.is_gpu
    label = "CPU times: " if cpu else ""
    known = ("linear", "gemm", "cast", "ceilings", "recipes", "outliers", "train", "divergence")
    key = machine.env_id
    every = tables.every_row(machine)
    of_parts = len(machine.frame) - len(every.rows)

    def suite(
        name: str, title: str, intro: str, figures: Sequence[Chart] = (), numeric: bool = False
    ) -> Section:
        """`numeric`: a suite whose figures mean the same on a CPU, and which therefore is not folded there."""
        found = [tables.suite_table(machine, name)] if name in suites else []
        said = title if numeric else label + title
        return Section(f"{name}-{key}", said, intro, charts=figures, tables=found, folded=cpu and not numeric)

    return [
        Section(
            f"findings-{key}",
            "Findings",
            "What these rows show to be wrong, with the likely cause and a way out.",
            first=[training.findings_table(machine)],
        ),
        Section(
            f"divergence-{key}",
            "Does it train the same",
            "Runs of a seed share weights and batches, so gaps are paired. PASS: every gate passed. FAIL: some gate "
            "failed. Anything else cannot be told from these runs. A CPU's losses count: they are numerics, not times.",
            first=[training.verdict_table(machine)] if machine.verdicts else [],
            charts=training_charts.losses(machine),
            tables=[training.reach_table(machine), training.layers_table(machine)]
            if machine.trainings
            else [],
        ),
        Section(
            f"gates-{key}",
            "Every gate in words",
            "Effect, interval, seeds and margin of each gate of the loss verdict.",
            tables=[training.gates_table(machine)] if machine.verdicts else [],
            folded=True,
        ),
        Section(
            f"speed-{key}",
            f"{label}FP8 against bf16",
            "Each pair is one case, timed in the same rounds; eager against eager, compile against compile.",
            first=[verdicts.gains(machine)],
            charts=charts.speedups(machine),
            folded=cpu,
        ),
        Section(
            f"squares-{key}",
            f"{label}Eager and compile, bf16 and FP8",
            "Forward and backward of one layer in ms. Speedups are against bf16 in the same column.",
            squares=tables.squares(machine),
            folded=cpu,
        ),
        Section(
            f"numerics-{key}",
            "Numerical quality",
            "Every arm is checked against a high-precision reference before it is timed; a wrong one gets no time.",
            charts=charts.soundness(machine),
            tables=[numerics.numerics_table(machine)],
        ),
        Section(
            f"train-{key}",
            f"{label}Training steps",
            "One optimizer step: forward, backward, update. Each ratio is against the bf16 arm that was run the same way.",
            charts=steps.breakdown(machine),
            tables=[*steps.steps_tables(machine), steps.traces_table(machine)] if "train" in suites else [],
            folded=cpu,
        ),
        suite("linear", "Layers", "All arms of the layer cases."),
        suite("gemm", "GEMMs by role", "D = A @ B with A [M, K] and B [K, N].", charts.rates(machine)),
        suite("cast", "Casts", "From high precision to FP8, scales included.", charts.casts(machine)),
        suite(
            "ceilings", "Ceilings", "What this device reaches at best; the other tables are read against it."
        ),
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
            "Casts alone, products summed in float64. The whole result's SQNR is the outliers'; the bulk is the rest. "
            "Times are the emulation's.",
            numeric=True,
        ),
        *(suite(name, name.capitalize(), "") for name in suites if name not in known),
        Section(
            f"compile-{key}",
            "Compile time",
            "First call of each compiled arm. It is in no other time of this report.",
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
            f"Every stored row ({len(every.rows):,})",
            "Medians and quartiles of all samples, none trimmed; the samples themselves are in the Parquet files."
            + (f" So are {text.plural(of_parts, 'row')} of layers and kernel classes." if of_parts else ""),
            tables=[every],
            folded=True,
            in_markdown=False,
        ),
    ]


def _dates(material: Material) -> str:
    days = sorted({day for m in material.machines for day in m.dates.split(" to ")})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _jinja() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters.update(cell=_markdown_cell, sort_key=_sort_key, bytes=text.bytes_)
    environment.globals.update(script="")
    return environment


def _interactive() -> dict[str, str]:
    """The DataTables bundle that itables ships, its licences, and the script that starts it."""
    source = find_package_file("html/dt_bundle.js").read_text(encoding="utf-8")
    script = (HERE / "page.js.j2").read_text()
    notices = re.search(r"/\*! Bundled license information:(.*?)\*/\s*(export|$)", source, re.DOTALL)
    files = metadata.files("itables") or []
    license_file = next(f for f in files if f.name == "LICENSE")
    return {
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        # mtime=0: the same report from the same data, byte for byte.
        "bundle": base64.b64encode(gzip.compress(source.encode(), 9, mtime=0)).decode(),
        "itables_version": metadata.version("itables"),
        "itables_license": license_file.read_text(),
        "bundle_license": notices[1].strip("\n") if notices else "(none stated)",
    }


def _markdown_cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _sort_key(value: object) -> str:
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        # JavaScript's parser knows no "inf".
        return repr(math.copysign(1e308, value)) if math.isinf(value) else repr(value)
    return str(value)
