"""docs/assurance.md: `python tests/assurance/page.py --write` makes it anew from the situations."""

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
import fleet_situations  # noqa: E402, F401
import gate_situations  # noqa: E402, F401
import report_situations  # noqa: E402, F401
import sweep_situations  # noqa: E402, F401
import verdict_situations  # noqa: E402, F401
import verify_situations  # noqa: E402, F401
from situations import SITUATIONS, Situation  # noqa: E402

PATH = ROOT / "docs" / "assurance.md"
INTRO = """\
# False assurances

Situations in which a positive word (PASS, OK, verified, on, fits) would be false, and what is given instead. A test
(`tests/assurance`) runs each with the planted thing, and an honest twin without it, and compares both answers: fields or exit codes.
`python tests/assurance/page.py --write` makes this page.

Exit codes are in [gate.md](gate.md), wrong implementations in [verify.md](verify.md#planted-faults) and
[loss-verdict-evidence.md](loss-verdict-evidence.md), ranks that run bf16 or do not answer in `tests/fp8core/test_verify_ranks.py`.

Not seen: a step that takes another path at every second call (`verify` compares the first call and counts the third).
"""


def text() -> str:
    """The page: a table for each command and word."""
    groups: dict[tuple[str, str, str], list[Situation]] = {}
    for case in SITUATIONS:
        groups.setdefault((case.command, case.word, _value(case.positive)), []).append(case)
    order = list(dict.fromkeys(case.command for case in SITUATIONS))
    lines = [INTRO, f"{len(SITUATIONS)} situations."]
    for (command, word, positive), cases in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        lines += ["", f"## {command}: {word}", "", f"| situation | given; twin: {positive} |", "|---|---|"]
        lines += [f"| {case.what} | {_value(case.instead)} |" for case in cases]
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
    else:
        sys.stdout.write(text())
