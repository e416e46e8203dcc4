"""The house in figures, as markdown: `python reports/studies/house.py [--repeats 3]`; `--picture` prints the rooms of docs/architecture.md,
`--weight` exits 1 where a room holds more tokens of code than pyproject.toml allows it (`make check`).

Packages, modules and lines; import layers; pages that are too long; the CPU seconds (user and system, the least of so many
repeats) and modules of commands that ought to be quick.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_WORDS = 1800
COMMANDS = (
    ("a mistyped axis", ["-m", "harness", "sweep=cast", "axes.dtyp=e4m3fn"]),
    ("`sweep=cast dry_run=true`", ["-m", "harness", "sweep=cast", "dry_run=true", "device=cpu"]),
    ("`import fp8core`", ["-c", "import fp8core"]),
    ("`import harness.store`", ["-c", "import harness.store"]),
    ("`--help`", ["-m", "harness", "--help"]),
    ("for comparison, `import torch`", ["-c", "import torch"]),
)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    shown = [head, ["---"] * len(head), *rows]
    return f"### {title}\n\n" + "\n".join("| " + " | ".join(map(str, row)) + " |" for row in shown)


NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def tokens(source: str) -> int:
    """Tokens of code: comments, docstrings and line breaks weigh nothing, so that merging lines gains nothing."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = [node for node in ast.walk(ast.parse(source)) if isinstance(node, owners)]
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in documented
        if ast.get_docstring(node, clean=False) is not None
    }
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in NOT_CODE and token.start not in docstrings for token in found)


def too_heavy() -> list[str]:
    """A line for each folder that weighs more than `tool.house.tokens` of pyproject.toml allows it."""
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["house"]["tokens"]
    weighed = {
        name: sum(tokens(path.read_text()) for path in (ROOT / name).rglob("*.py")) for name in allowed
    }
    return [
        f"{name} weighs {weighed[name]:,} tokens of code, {most:,} are allowed; make it lighter, "
        "or raise its line under [tool.house.tokens] in pyproject.toml and say why in the commit"
        for name, most in allowed.items()
        if weighed[name] > most
    ]


def contracts() -> list[dict[str, list[str]]]:
    """The import contracts that have layers."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return [contract for contract in linter["contracts"] if contract["type"] == "layers"]


def packages(name: str) -> str:
    """Modules and lines of each package; those of a package do not count for the one above it."""
    rows = []
    for folder in sorted({path.parent for path in (ROOT / name).rglob("*.py")}):
        files = list(folder.glob("*.py"))
        rows.append(
            (folder.relative_to(ROOT), len(files), sum(len(p.read_text().splitlines()) for p in files))
        )
    total = ("all", sum(row[1] for row in rows), sum(row[2] for row in rows))
    return table(name, ("package", "modules", "lines"), [*rows, total])


def picture() -> str:
    """The rooms of harness from the top down, what each says that it is, and the rooms that each imports."""
    (rooms,) = [c["layers"] for c in contracts() if c["containers"] == ["harness"]]
    lines = []
    for room in rooms:
        used: set[str] = set()
        for path in (ROOT / "harness" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("harness"):
                    inside = (node.module or "").split(".")[1:2]
                    used |= set(inside or [alias.name for alias in node.names])
        doc = ast.get_docstring(ast.parse((ROOT / "harness" / room / "__init__.py").read_text())) or ""
        words = " ".join(re.split(r"[.?;](?:\s|$)", doc.partition(":")[2])[0].split())
        below = [other for other in reversed(rooms) if other in used - {room}]
        lines.append(f"{room:9} {words}\n{'':9}   imports {', '.join(below) or 'no other room'}")
    return "\n".join(lines)


def cost(words: Sequence[str], repeats: int) -> tuple[str, int]:
    """CPU seconds of a run, by wait4, and the number of modules that it imports."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(*options: str) -> tuple[float, str]:
        child = subprocess.Popen(
            [sys.executable, *options, *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )  # fmt: skip
        assert child.stderr is not None
        said = child.stderr.read()
        _, child.returncode, usage = os.wait4(child.pid, 0)
        return usage.ru_utime + usage.ru_stime, said

    seconds = min(run()[0] for _ in range(repeats))
    return f"{seconds:.2f}", run("-X", "importtime")[1].count("import time:") - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("--weight", action="store_true")
    options = parser.parse_args()
    if options.weight:
        sys.exit("\n".join(too_heavy()) or None)
    if options.picture:
        print(picture())
        return
    pages = [(p.name, len(p.read_text().split())) for p in (ROOT / "docs").rglob("*.md")]
    layers = [(", ".join(c["containers"]), len(c["layers"])) for c in contracts()]
    costs = [(title, *cost(words, options.repeats)) for title, words in COMMANDS]
    print(*map(packages, ("fp8core", "harness", "tests")), table("Import layers", ("of", "layers"), layers),
          table(f"Pages over {MOST_WORDS} words", ("page", "words"), [p for p in pages if p[1] > MOST_WORDS]),
          table("Imports", ("command", "CPU s", "modules"), costs), sep="\n\n")  # fmt: skip


if __name__ == "__main__":
    main()
