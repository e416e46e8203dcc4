"""Render: machines and runs into one HTML file and its markdown twin."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import jinja2
from itables.utils import find_package_file
from markupsafe import Markup

from harness.report.compared import shared
from harness.report.drawing import standalone
from harness.report.facts import conditions, described, facts
from harness.report.first_screen import FirstScreen
from harness.report.headline import headline, headline_rows, overview
from harness.report.picture import picture
from harness.report.runs import dates
from harness.report.section import sections
from harness.report.words import HERE, say
from harness.store import printer, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.headline import HeadlineRow
    from harness.report.runs import Machine, Material
    from harness.report.section import Section

NO_WORDS = Markup()
FOLD = 12  # rows of a table that stays open; a longer one is folded
SHOWN = 100  # rows that stand in the page as they are; the rest of a longer table is packed beside it
MOST_MARKDOWN = 40


@dataclass(frozen=True, slots=True)
class Page:
    """A rendered report: HTML, its markdown twin, and each figure as an SVG file of its own, by file name."""

    html: str
    markdown: str
    figures: dict[str, str]


def render(
    material: Material, static: bool, focus: str = "", figures: str = "", others: Sequence[Section] = ()
) -> Page:
    """The report; the same input gives the same bytes.

    Args:
        material: what to show.
        static: leave out the JavaScript; tables then neither sort nor filter.
        focus: "mfu" puts MFU first, or the reason why there is none.
        figures: folder from which the markdown twin shows the figures; "": it shows none.
        others: sections about what others measured.
    """
    machines = material.machines
    rows = {m: headline_rows(m) for m in machines}
    views = [_view(machine, own, focus) for machine, own in rows.items()]
    notices = [f"Run {run.run_id} {run.state_note}." for run in material.runs if run.state_note]
    title, missing, definitions = machines[0].subject if len(views) == 1 else f"{len(views)} machines", "", []
    if focus == "mfu":
        from harness.report import steps

        missing, definitions = steps.why_none(material), steps.definitions()
        title = "No MFU was measured in these runs" if missing else title
        notices = [note for note in (missing, *notices) if note]
    together = shared(material)
    every = (*others, *together, *(s for view in views for s in view["sections"]))
    charts = [view["picture"] for view in views if view["picture"]] + [c for s in every for c in s.charts]
    controls = " and ".join(sorted(set().union(*(m.controls for m in machines))))
    days = sorted({day for m in machines for day in m.days})
    common = {
        "kicker": "Model FLOPs utilization, bf16 and FP8" if focus == "mfu" else f"FP8 against {controls}",
        "title": title,
        "subtitle": views[0]["conditions"] if len(views) == 1 else dates(days),
        "machines": views,
        "notices": [*notices, *material.problems],
        "first": others,
        "definitions": definitions,
        "overview": overview(rows) if len(rows) > 1 else None,
        "shared": together,
        "figures": figures,
        "runs": material.runs,
        "problems": material.problems,
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
    empty = dict.fromkeys(("machines", "notices", "definitions", "shared", "runs", "problems"), ())
    about = {
        "title": title,
        "kicker": kicker,
        "subtitle": subtitle,
        "first": shown,
        "overview": None,
        "words": words,
    }
    css = (HERE / "page.css").read_text(encoding="utf-8")
    return _jinja().get_template("page.html.j2").render(**empty, **about, css=css)


def _view(machine: Machine, rows: Sequence[HeadlineRow], focus: str) -> dict[str, Any]:
    """What the templates know about one machine."""
    return {
        "env_id": machine.env_id,
        "name": machine.name,
        "notice": say("cpu_notice", machine=machine),
        "conditions": conditions(machine),
        "described": described(machine),
        "lead": FirstScreen.of(machine).lines(),
        "picture": picture(machine),
        "headline": headline(machine, rows),
        "sections": sections(machine, "train" if focus == "mfu" else ""),
        "facts": facts(machine),
    }


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
        table=lambda of: printer.markdown_table(of, MOST_MARKDOWN),
        link=quote,
        md=text.markdown,
        code=text.code,
        bytes=text.bytes_,
        count=text.count,
    )
    environment.globals.update(
        script="", words="", rows=printer.rows_html, pack=pack, shown=SHOWN, most_markdown=MOST_MARKDOWN, fold=FOLD,
    )  # fmt: skip
    return environment


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
