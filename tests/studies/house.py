"""The house in figures, as markdown: `python tests/studies/house.py [--repeats 3] [--imports 10]`.

Packages, modules and lines; import layers of each contract; what is larger than it should be; the CPU seconds (user and
system, children included, the least of so many repeats) and modules of commands that ought to be quick.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES, MOST_WORDS = 400, 1800
MOST_WORDS_OF_THE_PAGE = 900  # docs/architecture.md
COMMANDS = (
    ("a mistyped sweep", ["-m", "harness", "sweep=gem"]),
    ("a mistyped axis", ["-m", "harness", "sweep=cast", "axes.dtyp=e4m3fn"]),
    ("`sweep=cast dry_run=true`", ["-m", "harness", "sweep=cast", "dry_run=true", "device=cpu"]),
    ("`import fp8core`", ["-c", "import fp8core"]),
    ("`import harness.store`", ["-c", "import harness.store"]),
    ("`--help`", ["-m", "harness", "--help"]),
    ("for comparison, `import torch`", ["-c", "import torch"]),
)


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def long_files() -> list[str]:
    """Files of code and tests with more than `MOST_LINES` lines."""
    files = (path for name in ("fp8core", "harness", "tests") for path in (ROOT / name).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in files if lines([path]) > MOST_LINES)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    shown = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in shown)


def packages(name: str) -> str:
    """Modules and lines of each package; those of a package do not count for the one above it."""
    rows = []
    for folder in sorted({path.parent for path in (ROOT / name).rglob("*.py")}):
        modules = sorted(folder.glob("*.py"))
        rows.append((str(folder.relative_to(ROOT)), len(modules), f"{lines(modules):,}"))
    every = list((ROOT / name).rglob("*.py"))
    loose = [p for p in (ROOT / name).glob("*.py") if p.name not in ("__init__.py", "__main__.py")]
    total = (
        f"{len(rows)} packages, {len(every)} modules, {lines(every):,} lines; {len(loose)} loose in {name}/"
    )
    return f"### {name}: {total}\n\n{table(['package', 'modules', 'lines'], rows)}"


def layers() -> str:
    """Layers of each import contract."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    rows = [
        (", ".join(contract["containers"]), len(contract["layers"]), contract["name"])
        for contract in linter["contracts"]
        if contract["type"] == "layers"
    ]
    return f"### Import layers\n\n{table(['of', 'layers', 'contract'], rows)}"


def picture() -> str:
    """The rooms of harness from the top down, what each says that it is, and the rooms that each imports."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (rooms,) = [c["layers"] for c in contracts if c.get("containers") == ["harness"]]
    lines = []
    for room in rooms:
        used = set()
        for path in sorted((ROOT / "harness" / room).rglob("*.py")):
            if path.match("gate/worker.py"):  # it runs in another work tree
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("harness"):
                    inside = (node.module or "").split(".")[1:2]
                    used |= set(inside or [alias.name for alias in node.names])
        doc = ast.get_docstring(ast.parse((ROOT / "harness" / room / "__init__.py").read_text())) or ""
        words = " ".join(re.split(r"[.?;](?:\s|$)", doc.partition(":")[2])[0].split())
        below = [other for other in reversed(rooms) if other in used - {room}]
        lines.append(f"{room:9} {words}\n{'':9}   imports {', '.join(below) or 'no other room'}")
    return "\n".join(lines)


def docstrings() -> int:
    """Docstrings that begin with "Of " or "As "."""
    count = 0
    for path in (p for name in ("fp8core", "harness") for p in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                count += (ast.get_docstring(node) or "").startswith(("Of ", "As "))
    return count


def sizes() -> str:
    """What is larger than it should be."""
    tests = list((ROOT / "tests").rglob("*.py"))
    wordy = {p.name: len(p.read_text().split()) for p in (ROOT / "docs").glob("*.md") if p.name != "LOG.md"}
    wordy = {name: count for name, count in wordy.items() if count > MOST_WORDS}
    functions = sum(len(re.findall(r"^def test_", p.read_text(), re.MULTILINE)) for p in tests)
    rows = [
        (
            "lines of tests",
            f"{lines(tests):,} in {len(tests)} files, {functions:,} test functions",
        ),
        (
            f"files over {MOST_LINES} lines",
            ", ".join(long_files()) or "none",
        ),
        (
            f"docs over {MOST_WORDS} words",
            ", ".join(f"{n} ({c:,})" for n, c in sorted(wordy.items())) or "none",
        ),
        ('docstrings that begin with "Of" or "As"', docstrings()),
    ]
    return f"### Sizes\n\n{table(['what', 'figure'], rows)}"


def cpu_seconds(words: Sequence[str], folder: str) -> float:
    """User and system time of one run, by wait4."""
    child = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, _, usage = os.wait4(child.pid, 0)
    child.returncode = 0
    return usage.ru_utime + usage.ru_stime


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def imported(words: Sequence[str], folder: str) -> list[tuple[int, int, str]]:
    """(cumulative microseconds, depth, module) of each import."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words], cwd=folder, env=environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    found = re.findall(r"^import time: +\d+ \| +(\d+) \| ( *)(\S+)$", done.stderr, re.MULTILINE)
    return [(int(spent), len(depth) // 2, name) for spent, depth, name in found]


def imports(repeats: int, heaviest: int) -> str:
    """CPU seconds and imported modules of each command, and the heaviest of its own modules."""
    rows, details = [], []
    with tempfile.TemporaryDirectory() as folder:
        for title, words in COMMANDS:
            least = min(cpu_seconds(words, folder) for _ in range(repeats))
            modules = imported(words, folder)
            names = {name for _, _, name in modules}
            heavy = [
                n
                for n in ("torch", "triton", "torch.distributed.tensor", "pandas", "hydra", "fp8core")
                if n in names
            ]
            rows.append((title, f"{least:.2f}", len(names), ", ".join(heavy)))
            own = sorted((m for m in modules if m[2].startswith(("harness", "fp8core"))), reverse=True)[
                :heaviest
            ]
            if own:
                whole = sum(spent for spent, depth, _ in modules if depth == 0)
                shown = ", ".join(f"{name} {spent / whole:.0%}" for spent, _, name in own)
                details.append(f"- {title}: {shown}")
    head = table(["command", "CPU s", "modules", "imports"], rows)
    return (
        f"### Imports (least of {repeats})\n\n{head}\n\nHeaviest modules of ours, with all below them, in % of the time of all imports:\n\n"
        + "\n".join(details)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--picture", action="store_true", help="print the rooms of docs/architecture.md alone"
    )
    parser.add_argument("--imports", type=int, default=8, help="modules to name")
    options = parser.parse_args()
    if options.picture:
        print(picture())
        return
    print(packages("fp8core"), packages("harness"), layers(), sizes(), sep="\n\n")
    print("\n" + imports(options.repeats, options.imports))


if __name__ == "__main__":
    main()
