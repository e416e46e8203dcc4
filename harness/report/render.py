"""Render: machines and runs into one HTML file and its markdown twin."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import jinja2
from itables.utils import find_package_file
from markupsafe import Markup

from harness.report.compared import shared
from harness.report.drawing import standalone
from harness.report.facts import conditions, described, facts
from harness.report.first_screen import FirstScreen
from harness.report.headline import headline, headline_rows
from harness.report.picture import picture
from harness.report.runs import dates
from harness.report.section import Section, sections
from harness.store import printer, text
from harness.store.printer import Cell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.runs import Machine, Material
    from harness.store.printer import Table

HERE = Path(__file__).parent
NO_WORDS = Markup()
MFU = "Model FLOPs utilization (MFU), bf16 and FP8"
CPU_NOTICE = (
    "Measured on a CPU. These runs validate numerics, bytes moved and the harness itself. "
    "CPU timings are no evidence about a GPU's speed."
)
FOLD = 12  # rows of a table that stays open; a longer one is folded
SHOWN = 100  # rows that stand in the page as they are; the rest of a longer table is packed beside it
MOST_MARKDOWN = 40


@dataclass(frozen=True, slots=True)
class Page:
    """A rendered report: HTML, its markdown twin, and each figure as an SVG file of its own, by file name."""

    html: str
    markdown: str
    figures: dict[str, str]


def render(material: Material, static: bool, focus: str = "", figures: str = "") -> Page:
    """The report; the same input gives the same bytes.

    Args:
        material: what to show.
        static: leave out the JavaScript; tables then neither sort nor filter.
        focus: "mfu" puts MFU first, or the reason why there is none.
        figures: folder from which the markdown twin shows the figures; "": it shows none.
    """
    machines = material.machines
    views = [_view(machine, focus) for machine in machines]
    notices = [f"Run {run.run_id} {run.state_note}." for run in material.runs if run.state_note]
    controls = " and ".join(sorted(set().union(*(m.controls for m in machines))))
    kicker, last = f"FP8 against {controls}", [*shared(material)]
    title = machines[0].subject if len(views) == 1 else text.some([m.name for m in machines], 3, ", ")
    if focus == "mfu":
        from harness.report import steps

        missing = steps.why_none(material)
        kicker, title = title, "No MFU was measured in these runs" if missing else MFU
        notices = [note for note in (missing, *notices) if note]
        last.append(Section("definitions", "What the columns mean", facts=steps.definitions()))
    every = [s for view in views for s in view["sections"]]
    charts = [view["picture"] for view in views if view["picture"]] + [c for s in every for c in s.charts]
    days = sorted({day for m in machines for day in m.days})
    common = {
        "kicker": kicker,
        "title": title,
        "subtitle": views[0]["conditions"] if len(views) == 1 else dates(days),
        "machines": views,
        "notices": [*notices, *material.problems],
        "first": (),
        "last": [*last, _runs(material)],
        "figures": figures,
    }
    environment, css = _jinja(), (HERE / "page.css").read_text(encoding="utf-8")
    script = {} if static else _interactive()
    html = environment.get_template("page.html.j2").render(**common, css=css, **script)
    markdown = environment.get_template("page.md.j2").render(**common)
    return Page(html, markdown, {f"{c.key}.svg": standalone(c, css) for c in charts})


def render_sections(
    title: str, kicker: str, subtitle: str, shown: Sequence[Section], words: Markup = NO_WORDS
) -> str:
    """A page of sections alone, then some words, about no machine, in HTML without JavaScript."""
    empty = dict.fromkeys(("machines", "notices", "last"), ())
    about = {"title": title, "kicker": kicker, "subtitle": subtitle, "first": shown, "words": words}
    css = (HERE / "page.css").read_text(encoding="utf-8")
    return _jinja().get_template("page.html.j2").render(**empty, **about, css=css)


def _view(machine: Machine, focus: str) -> dict[str, Any]:
    """What the templates know about one machine."""
    environment = Section(f"environment-{machine.env_id}", "Environment", facts=facts(machine))
    return {
        "env_id": machine.env_id,
        "name": machine.name,
        "notice": "" if machine.is_gpu else CPU_NOTICE,
        "conditions": conditions(machine),
        "described": described(machine),
        "lead": FirstScreen.of(machine).lines(),
        "picture": picture(machine),
        "headline": headline(machine, headline_rows(machine)),
        "sections": [*sections(machine, "train" if focus == "mfu" else ""), environment],
    }


def _runs(material: Material) -> Section:
    """Where the rows come from: the command of each run, and its files by relative link and checksum."""
    about = [
        (Cell(r.run_id, note=r.state_note), r.sweep, str(r.about.get("question") or ""),
            str(r.about.get("started_at") or "")[:16].replace("T", " "),
         Cell(str(r.about.get("command") or ""), style="command"))
        for r in material.runs
    ]  # fmt: skip
    files = [
        (Cell(f.name, href=f.href), r.run_id, Cell(text.bytes_(f.size), f.size), Cell(f.sha256, style="id"))
        for r in material.runs
        for f in r.files
    ]
    runs = printer.table("Runs", ["run", "sweep", "question", "started (UTC)", "command"], about)
    data = printer.table("Files", ["file", "run", ">size", "sha256"], files)
    return Section("runs", "Runs and data", tables=[runs, data])


@cache
def _jinja() -> jinja2.Environment:
    """The templates, compiled once a process."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        table=_markdown,
        link=quote,
        md=text.markdown,
        count=text.count,
    )
    environment.globals.update(script="", words="", table=_table, fold=FOLD)
    return environment


def _table(of: Table, script: str) -> Markup:
    """A table in HTML, the rest of a long one packed beside it where a script unpacks it."""
    if not (script and of.sortable and len(of.rows) > SHOWN):
        return Markup('<div class="scroll">{}</div>').format(printer.html_table(of))
    less = f"The first {SHOWN} of {len(of.rows):,} rows; without JavaScript, make the report with --static."
    return Markup(
        '<div class="scroll">{}</div><noscript><p class="intro">{}</p></noscript><script type="text/plain" id="p-{}">{}</script>'
    ).format(printer.html_table(of, SHOWN), less, of.key, pack(printer.rows_html(of, SHOWN)))


def _markdown(of: Table) -> str:
    """A table in markdown, and how many rows it leaves out."""
    left = f"\nThe first {MOST_MARKDOWN} of {len(of.rows) + of.left_out:,} rows; the HTML report has more, the Parquet files have all.\n"
    return printer.markdown_table(of, MOST_MARKDOWN) + left * (len(of.rows) > MOST_MARKDOWN)


def _interactive() -> dict[str, str]:
    """The DataTables bundle that itables ships, its licences, and the script that starts it."""
    source = find_package_file("html/dt_bundle.js").read_text(encoding="utf-8")
    script = (HERE / "page.js.j2").read_text(encoding="utf-8")
    notices = re.search(r"/\*! Bundled license information:(.*?)\*/\s*(export|$)", source, re.DOTALL)
    license_file = next(f for f in metadata.files("itables") or [] if f.name == "LICENSE")
    return {
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "bundle": pack(source),
        "itables_version": metadata.version("itables"),
        "itables_license": license_file.read_text(encoding="utf-8"),
        "bundle_license": notices[1].strip("\n") if notices else "(none stated)",
    }


def pack(words: str) -> str:
    """Text as gzip in base64, for the page to unpack; the same text gives the same bytes (mtime=0)."""
    return base64.b64encode(gzip.compress(words.encode(), mtime=0)).decode()


def _shown(value: object) -> object:
    return text.printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
