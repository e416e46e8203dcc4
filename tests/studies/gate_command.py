"""A/A sittings of `gate --command` on a small repository: `python tests/studies/gate_command.py [--sittings N] [-o FILE.md]`.

Each sitting is the whole command on a change of the documentation alone, in a repository made for it with a real suite of
pytest-benchmark. Prints a table of exit codes, verdicts, changes and seconds, with the load average of each sitting.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "harness")]

from command_repo import PYTEST, SPIN, TIMER, WORK, commit, gate, spinning  # noqa: E402


def sitting(folder: Path, factor: float, wall: bool, words: list[str]) -> str:
    """One row of the table."""
    package, command = (WORK, PYTEST.replace(TIMER, "")) if wall else (SPIN, PYTEST)
    root = spinning(folder, package)
    commit(root, {"README.md": "words\n", "pkg.py": package.format(factor=factor)})
    before, begun = os.getloadavg()[0], time.monotonic()
    code, said, document = gate(root, "--command", command, *words)
    seconds = time.monotonic() - begun
    changes = [
        f"{100 * (finding['change'] - 1):+.1f} %"
        for finding in document.get("findings", [])
        if isinstance(finding["change"], float)
    ]
    verdict = document.get("verdict") or said.strip().splitlines()[-1]
    load = f"{before:.1f} to {os.getloadavg()[0]:.1f}"
    return f"| {code} | {verdict} | {', '.join(changes)} | {seconds:.0f} | {load} |"


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sittings", type=int, default=20)
    parser.add_argument(
        "--factor", type=float, default=1.0, help="what the change makes of each time; 1 is A/A"
    )
    parser.add_argument(
        "--wall", action="store_true", help="fixed work by the wall clock, not processor time"
    )
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("words", nargs="*", help="further words of the gate, after --")
    options = parser.parse_args()
    lines = ["| exit | verdict | changes | seconds | load average |", "|---|---|---|---|---|"]
    for number in range(options.sittings):
        with tempfile.TemporaryDirectory() as folder:
            lines.append(sitting(Path(folder) / "repo", options.factor, options.wall, options.words))
        print(f"{number + 1} of {options.sittings}: {lines[-1]}", flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
