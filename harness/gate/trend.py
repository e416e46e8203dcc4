"""Trend: stored runs as one page, a line a unit, so that what crept in over many changes is seen.

A gate compares two commits; ten changes of 2 % each pass it one by one. The page draws the values of every run of one
environment in the order of time. Values of different environments are never joined.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness import store
from harness.gate.sides import CONTROL_SUITE
from harness.store.arm import controls
from harness.store.compare import rows_of
from harness.store.errors import UsageError
from harness.store.measurement import METRICS
from harness.store.text import axes_of, case_label, number

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 260, 44  # of a line, in pixels
CREPT = 0.05  # a last value this far from the best so far is marked
PAGE_CSS = Path(__file__).parent.parent / "report" / "page.css"


@dataclass(frozen=True, slots=True)
class Point:
    """The value of one unit in one run."""

    when: str
    commit: str
    value: float


@dataclass(frozen=True, slots=True)
class Line:
    """One unit over time, in one environment."""

    env_id: str
    device: str
    name: str
    unit: str
    better: str
    points: tuple[Point, ...]

    @property
    def crept(self) -> float:
        """How much worse the last value is than the best one before it, as a share; 0 for a single point."""
        values = [p.value for p in self.points]
        if len(values) < 2:
            return 0.0
        best = max(values[:-1]) if self.better == "higher" else min(values[:-1])
        change = (values[-1] - best) / abs(best) if best else 0.0
        return 0.0 - change if self.better == "higher" else change

    @property
    def constant(self) -> bool:
        """Whether several runs gave the same value; such lines are counted and not drawn."""
        return len(self.points) > 1 and len({p.value for p in self.points}) == 1


def lines_of(names: Sequence[str | Path], results_dir: str | Path = "results") -> list[Line]:
    """Every unit that is finite in at least one run, those that crept furthest first.

    Raises:
        UsageError: a run does not exist, or nothing in them can be drawn.
    """
    frame = store.read([store.find_run(name, results_dir) for name in names])
    frame = frame[
        (frame["status"] == "ok")
        & frame["better"].isin(["lower", "higher"])
        & ~controls(frame)
        & (frame["suite"] != CONTROL_SUITE)
        & ~(
            frame["metric"].isin([m.name for m in METRICS.values() if m.series])
            & (frame["samples"].map(len) > 1)
        )
    ]
    found: dict[tuple[str, ...], list[Point]] = defaultdict(list)
    about: dict[tuple[str, ...], tuple[str, str, str, str]] = {}
    for row in rows_of(frame.sort_values("created_at", kind="stable")):
        if not math.isfinite(row["value"]):
            continue
        part = row["part"] or ""
        key = tuple(row[n] or "" for n in ("env_id", "suite", "case_id", "arm", "metric", "regime", "part"))
        env = axes_of(row["env"])
        when, commit = str(row["created_at"])[:16], str(env.get("git_commit") or "")[:10]
        found[key].append(Point(when, commit, row["value"]))
        case = case_label(axes_of(row["axes"]))
        label = " ".join(filter(None, (row["suite"], case, part, row["arm"], row["metric"])))
        device = str(env.get("gpu") or env.get("cpu") or env.get("device"))
        about[key] = (device, label, row["unit"], row["better"])
    if not found:
        raise UsageError(
            f"nothing to draw in {', '.join(map(str, names))}: no value that is better high or low"
        )
    lines = [Line(key[0], *about[key], points=tuple(points)) for key, points in found.items()]
    return sorted(lines, key=lambda line: (line.env_id, -line.crept, line.name))


def write_trend(names: Sequence[str | Path], target: Path, results_dir: str | Path = "results") -> Path:
    """Writes the page and its markdown twin; returns the page's path.

    Raises:
        UsageError: as `lines_of`, or the target can't be written.
    """
    if target.suffix != ".html":
        raise UsageError(f"the trend page {target} must be named *.html")
    lines = lines_of(names, results_dir)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_page(lines), encoding="utf-8")
        target.with_suffix(".md").write_text(_markdown(lines), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {target} ({error.strerror}); choose another with -o FILE.html"
        ) from error
    return target


def _page(lines: Sequence[Line]) -> str:
    body = []
    for env_id, group in _by_environment(lines).items():
        rows = "\n".join(_row(line) for line in group if not line.constant)
        body.append(
            f"<section><h3>{html.escape(group[0].device)} <small>{html.escape(env_id)}</small></h3>"
            f'<div class="scroll"><table><thead><tr><th>unit</th><th>over time</th><th class="n">runs</th>'
            f'<th class="n">first</th><th class="n">last</th><th class="n">worse than the best</th></tr></thead>\n'
            f"<tbody>\n{rows}\n</tbody></table></div><p>{_constant(group)}</p></section>"
        )
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>Trend</title>\n'
        f"<style>\n{PAGE_CSS.read_text(encoding='utf-8')}\n"
        "figure svg, td svg { width: auto; min-width: 0; }\ntd.crept { color: var(--no); font-weight: 600; }\n</style>\n"
        "</head>\n<body>\n<header><h1>Trend</h1>"
        '<p class="conditions">Each line is one unit on one environment, a point a run; its axis runs from its lowest '
        f"to its highest value. Marked: {CREPT:.0%} or more worse than its best run.</p></header>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _row(line: Line) -> str:
    values = [p.value for p in line.points]
    crept = f"{line.crept:+.1%}" if len(values) > 1 else ""
    mark = ' class="n crept"' if line.crept >= CREPT else ' class="n"'
    unit = f" {line.unit}" if line.unit != "1" else ""
    cells = (f"{number(values[0])}{unit}", f"{number(values[-1])}{unit}")
    return (
        f'<tr><td>{html.escape(line.name)}</td><td>{_svg(line)}</td><td class="n">{len(values)}</td>'
        + "".join(f'<td class="n">{html.escape(cell)}</td>' for cell in cells)
        + f"<td{mark}>{crept}</td></tr>"
    )


def _svg(line: Line) -> str:
    """The points joined, each with its run in a tooltip."""
    values = np.array([p.value for p in line.points])
    low, high = float(values.min()), float(values.max())
    span = high - low or 1.0
    step = (WIDTH - 12) / max(len(values) - 1, 1)
    places = [
        (6 + i * step, HEIGHT - 6 - (HEIGHT - 12) * (float(v) - low) / span if high > low else HEIGHT / 2)
        for i, v in enumerate(values)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>'
        f"{html.escape(f'{p.when} {p.commit}: {number(p.value, 4)} {line.unit}')}</title></circle>"
        for (x, y), p in zip(places, line.points, strict=True)
    )
    return (
        f'<svg role="img" aria-label="{html.escape(line.name)} over {len(values)} runs" width="{WIDTH}" '
        f'height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" fill="var(--series-0)">'
        f'<polyline points="{path}" fill="none" stroke="var(--series-0)" stroke-width="1.5"/>{dots}</svg>'
    )


def _markdown(lines: Sequence[Line]) -> str:
    out = ["# Trend", ""]
    for env_id, group in _by_environment(lines).items():
        out += [
            f"## {group[0].device} ({env_id})",
            "",
            "| unit | runs | first | last | worse than the best |",
        ]
        out += ["|---|---|---|---|---|"]
        for line in group:
            if line.constant:
                continue
            values = [p.value for p in line.points]
            crept = f"{line.crept:+.1%}" if len(values) > 1 else ""
            name = line.name.replace("|", "\\|")
            out.append(
                f"| {name} | {len(values)} | {number(values[0])} {line.unit} | {number(values[-1])} {line.unit} | {crept} |"
            )
        out += ["", _constant(group), ""]
    return "\n".join(out)


def _constant(group: Sequence[Line]) -> str:
    count = sum(line.constant for line in group)
    return f"{count} of {len(group)} units had the same value in every run, and are not shown."


def _by_environment(lines: Sequence[Line]) -> dict[str, list[Line]]:
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        groups[line.env_id].append(line)
    return groups
