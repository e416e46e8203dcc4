"""docs/assurance.md and the list that it links: `python tests/assurance/page.py --write` makes it anew from the situations."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":  # pytest gets these from pyproject.toml
    sys.path[:0] = [
        str(ROOT / "tests" / part)
        for part in ("assurance", "fp8core", "harness", "harness/report", "studies")
    ]

import advise_situations  # noqa: E402, F401
import curve_situations  # noqa: E402, F401
import fleet_situations  # noqa: E402, F401
import gate_situations  # noqa: E402, F401
import report_situations  # noqa: E402, F401
import sweep_situations  # noqa: E402, F401
import verdict_situations  # noqa: E402, F401
import verify_situations  # noqa: E402, F401
from situations import SITUATIONS, Situation  # noqa: E402

PATH = ROOT / "docs" / "assurance.md"
LIST = ROOT / "reports" / "published" / "studies" / "assurance.md"
INTRO = """\
# What a positive word rules out

Look up when a positive word (PASS, OK, verified, on, fits) would be false, and what is given instead. A test (`tests/assurance`) runs each
situation with the planted thing, and an honest twin without it, and compares both answers: fields or exit codes.
[Every situation](../reports/published/studies/assurance.md) is listed; here they are counted. Made by
`python tests/assurance/page.py --write`.

Exit codes are in [gate.md](gate.md), wrong implementations in [verify.md](verify.md#planted-faults) and
[loss-verdict-evidence.md](loss-verdict-evidence.md). Not seen: a step that takes another path at every second call (`verify` compares
the first call and counts the third); a user's benchmark that
measures something else, prints cached figures, or rewrites the clock or its JSON (`gate`).
"""


def grouped() -> dict[tuple[str, str], list[Situation]]:
    """The situations of each command and word."""
    groups: dict[tuple[str, str], list[Situation]] = {}
    for case in SITUATIONS:
        groups.setdefault((case.command, case.word), []).append(case)
    return groups


def text() -> str:
    """The page: a line for each command."""
    commands: dict[str, list[Situation]] = {}
    for case in SITUATIONS:
        commands.setdefault(case.command, []).append(case)
    lines = [
        INTRO,
        f"{len(SITUATIONS)} situations.",
        "",
        "| of | situations | the first | given; twin |",
        "|---|---|---|---|",
    ]
    for command, cases in commands.items():
        first = cases[0]
        given = f"{first.word}: {_value(first.instead)}; {_value(first.positive)}"
        lines.append(f"| {command} | {len(cases)} | {first.what} | {given} |")
    return "\n".join(lines) + "\n"


def listed() -> str:
    """All of them: a table for each command and word."""
    lines = [
        "# False assurances",
        "",
        f"{len(SITUATIONS)} situations; [what they are](../../../docs/assurance.md).",
    ]
    for (command, word), cases in grouped().items():
        lines += ["", f"## {command}: {word}", "", "| situation | given | twin |", "|---|---|---|"]
        lines += [f"| {case.what} | {_value(case.instead)} | {_value(case.positive)} |" for case in cases]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value) or "none"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PATH.write_text(text(), encoding="utf-8")
        LIST.write_text(listed(), encoding="utf-8")
    else:
        sys.stdout.write(text())
