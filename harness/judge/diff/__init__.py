"""`python -m harness diff RUN RUN`: what changed between two runs, and where the time went."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from harness import store
from harness.judge.diff.changes import CAUSES, POLICY, Changes, changes
from harness.machine.terminal import console, printable, row, say, table
from harness.store.errors import UsageError
from harness.store.text import axes_of, case_label, constant_axes, number
from harness.store.words import key, options_of, word

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from rich.console import Console
    from rich.table import Table

CPU_CAUTION = (
    "measured on a CPU: its times decide nothing about a GPU, and another day's load moves them; set-up, losses and other "
    "figures compare"
)
_MOST = 20
_STYLES = {"slower": "red", "faster": "green"}


@dataclass(frozen=True, slots=True)
class Words:
    """python -m harness diff: what changed between two runs: the set-up, what ran, times and where they went
    exit 0 compared; 2 the request could not be carried out
    """

    runs: list[str] = word("RUN RUN", "folders results/<sweep>/<run_id>, or their ids")
    json: bool = key("as plain values", False)
    results_dir: str = key("where run ids are looked up", "results")


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: not two runs, an unknown word, or a run without a row.
    """
    if (options := options_of(Words, words)) is None:
        return 0
    runs = options.runs
    if len(runs) != 2:
        raise UsageError(
            f"diff takes two runs, got {len(runs)}: folders results/<sweep>/<run_id>, or their ids"
        )
    frames = [_read(run, options.results_dir) for run in runs]
    found = changes(*frames)
    if options.json:
        print(json.dumps(as_dict(found), indent=1))  # noqa: T201  # asked for on standard output
        return 0
    show(found, runs, console())
    return 0


def _read(run: str, results_dir: str) -> pd.DataFrame:
    frame, _ = store.read_quietly(store.find_run(run, results_dir))
    if frame.attrs["problems"]:
        raise UsageError(f"cannot read {printable(frame.attrs['problems'][0])}; measure it again")
    if not len(frame):
        raise UsageError(f"{run} holds no row")
    return frame


def show(found: Changes, runs: Sequence[str], where: Console) -> None:
    """What changed first, then times by how far they moved, then where the time went."""
    say(where, f"{runs[0]} -> {runs[1]}", "bold")
    if "gpu" in found.environment or "device" in found.environment:
        say(
            where,
            "another device: times differ for that reason; compare speedups within each run",
            "yellow",
        )
    if found.cpu:
        say(where, CPU_CAUTION, "yellow")
    for part in (_environment(found), _resolved(found), _times(found), _parts(found), _figures(found)):
        if part.row_count:
            where.print(part)
    for name, keys in (("only in the first", found.only_before), ("only in the second", found.only_after)):
        if keys:
            say(where, f"{name}: {_some(['/'.join(key) for key in keys])}")
    for suite, case, arm, reason in found.broken[:_MOST]:
        say(where, f"had a time and has none: {suite}/{case}/{arm}: {reason}", "red")
    counts = Counter(t.verdict for t in found.times)
    summary = ", ".join(f"{counts[v]} {v}" for v in ("slower", "faster", "same", "unclear") if counts[v])
    say(where, summary or "no time in common", "bold")
    if summary:
        say(where, POLICY)


def as_dict(found: Changes) -> dict[str, Any]:
    """Plain values; NaN and infinities as null."""
    return {
        "environment": {name: list(pair) for name, pair in found.environment.items()},
        "resolved": [
            {"suite": suite, "arm": arm, "field": name, "before": one, "after": other, "cases": count}
            for (suite, arm, name), (one, other, count) in found.resolved.items()
        ],
        "only_before": [list(key) for key in found.only_before],
        "only_after": [list(key) for key in found.only_after],
        "broken": [list(key) for key in found.broken],
        "times": [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(t).items()}
            for t in found.times
        ],
        "parts": [asdict(part) for part in found.parts],
        "figures": [list(figure) for figure in found.figures],
        "cpu": found.cpu,
        "caution": CPU_CAUTION if found.cpu else "",
        "policy": POLICY,
    }


def _environment(found: Changes) -> Table:
    shown = table("set-up", "field", "before", "after")
    for name, (one, other) in found.environment.items():
        row(shown, name, _value(one), _value(other))
    return shown


def _resolved(found: Changes) -> Table:
    shown = table("what ran", "arm", "field", "before", "after", "cases")
    for (suite, arm, name), (one, other, count) in list(found.resolved.items())[:_MOST]:
        row(shown, f"{suite}/{arm}", name, _value(one), _value(other), str(count))
    return shown


def _times(found: Changes) -> Table:
    shown = table(
        "times, by how far they moved (ms)", "case", "arm", ">before", ">after", ">ratio", "", "why"
    )
    moved = [t for t in found.times if t.verdict in _STYLES]
    constant = constant_axes(t.axes for t in found.times)
    for t in sorted(moved, key=lambda t: -abs(math.log(t.ratio)))[:_MOST]:
        label = case_label(axes_of(t.axes), constant)
        interval = f"{t.ratio:.3f} ({t.low:.2f}-{t.high:.2f})"
        cells = (number(1e3 * t.before, 4), number(1e3 * t.after, 4), interval, t.verdict, t.cause)
        arm = t.arm if t.metric == "time_ms" else f"{t.arm} {t.metric}"
        row(shown, label, arm, *cells, style=_STYLES[t.verdict])
    causes = dict.fromkeys(t.cause for t in moved if t.cause)
    if causes:
        shown.caption = Text("; ".join(f"{cause}: {CAUSES[cause]}" for cause in causes))
    if len(moved) > _MOST:
        shown.title = Text(f"times, the {_MOST} of {len(moved)} that moved most (ms)")
    return shown


def _parts(found: Changes) -> Table:
    shown = table(
        "where a profiled step's time went (ms)", "case", "arm", "kernels", ">before", ">after", ">change"
    )
    for part in sorted(found.parts, key=lambda p: -abs(p.after - p.before))[:_MOST]:
        if part.before != part.after:
            cells = (number(part.before), number(part.after), f"{part.after - part.before:+.3g}")
            row(shown, part.case_id, part.arm, part.part, *cells)
    return shown


def _figures(found: Changes) -> Table:
    shown = table("other figures that differ by more than 1 %", "case", "arm", "metric", ">before", ">after")
    ranked = sorted(found.figures, key=lambda f: -abs(f[5] - f[4]) / max(abs(f[4]), abs(f[5])))
    for suite, case, arm, metric, one, other in ranked[:_MOST]:
        row(shown, f"{suite}/{case}", arm, metric, number(one, 4), number(other, 4))
    return shown


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - _MOST} more" if len(words) > _MOST else ""
    return ", ".join(words[:_MOST]) + more
