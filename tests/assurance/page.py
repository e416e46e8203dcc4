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

Situations in which a positive word (PASS, OK, verified, on, 100 %, runs) would be false, what says that word, and what is
given instead. Each line is planted by a test (`tests/assurance`), which runs the public function or command twice: with the
planted thing, and as an honest twin without it. Both answers are compared, as a field or an exit code.
`python tests/assurance/page.py --write` makes this page from those cases.

Exit codes of the gate are those of [gate.md](gate.md). Wrong implementations, in place of wrong situations, are in
[verify.md](verify.md#planted-faults) and [loss-verdict-faults.md](loss-verdict-faults.md). Ranks of which one runs bf16, or does
not answer, need several processes: `tests/fp8core/test_verify_ranks.py`.

Not seen: a step that takes another path at every second call (`verify` compares the first call and counts the third), and FP8
runs stored without a proof, from before November 2026.
"""


def text() -> str:
    """The page."""
    lines = [
        INTRO,
        f"{len(SITUATIONS)} situations:",
        "",
        "| command | situation | word | given | twin |",
        "|---|---|---|---|---|",
    ]
    order = {name: number for number, name in enumerate(dict.fromkeys(case.command for case in SITUATIONS))}
    lines += [_line(case) for case in sorted(SITUATIONS, key=lambda case: order[case.command])]
    return "\n".join(lines) + "\n"


def _line(case: Situation) -> str:
    cells = (case.command, case.what, case.word, _value(case.instead), _value(case.positive))
    return f"| {' | '.join(cells)} |"


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
