"""What a GPU session imports where nothing can be fetched. Oracle: a finder that hides every other package.

Such a box has torch and what comes with it, and the packages of `BOX`; the rest travels as the wheels of `make wheels`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# What a box made for torch has beside it, by distribution; jinja2 and numpy's like come with these.
BOX = ("torch", "triton", "numpy", "pandas", "pyarrow", "matplotlib", "jinja2", "rich", "pyyaml", "psutil",
       "nvidia-ml-py", "scipy", "pytest", "pytest-benchmark", "packaging", "typing_extensions")  # fmt: skip
# Imported inside a function that says what to do without: peers that need a GPU of their own to build.
OPTIONAL = {
    "transformer_engine": "peer",
    "deep_gemm": "peer",
    "aiter": "peer",
    "tensorboard": "of files that somebody has; without it one line says what to install",
}


def wheels() -> list[str]:
    """Distributions that `make wheels` collects, as pip spells them."""
    rule = re.search(r"^wheels:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rule is not None
    words = rule[1].replace("\\\n", " ").split("-w wheels")[1].split()
    return [re.split(r"[=<>]", word.strip('"'))[0] for word in words]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_needs(names: list[str]) -> set[str]:
    """Distributions with all that they need, extras left out, as far as it is installed here."""
    found: set[str] = set()
    waiting = [canonical(name) for name in names]
    installed = {canonical(d) for own in packages_distributions().values() for d in own}
    while waiting:
        name = waiting.pop()
        if name in installed and name not in found:
            found.add(name)
            needs = [n for n in requires(name) or [] if "extra ==" not in n]
            waiting += [canonical(re.split(r"[\s\[<>=!~;(]", need)[0]) for need in needs]
    return found


def imported(folder: str) -> dict[str, set[str]]:
    """Top-level names that the files below a folder import anywhere, with the files."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(str(path.relative_to(ROOT)))
    return found


def test_every_package_is_on_the_box_or_among_the_wheels() -> None:
    there = with_needs(list(BOX)) | {canonical(name) for name in wheels()}
    by_module = packages_distributions()
    for folder in ("harness", "fp8core"):
        for module, files in imported(folder).items():
            ours = module in ("harness", "fp8core", "sitecustomize")  # the last is a user's own, or none
            if module in sys.stdlib_module_names or ours or module in OPTIONAL:
                continue
            distributions = {canonical(name) for name in by_module.get(module, [])}
            assert distributions & there, f"{module}, imported by {sorted(files)}: add it to `make wheels`"


@pytest.mark.parametrize(
    "work",
    [
        "import harness.cli.parts, harness.cli.run, harness.cli.doctor; from harness.cli.config import load; "
        "load(['sweep=quick'], lambda device: 'cpu')",
        "from harness.report import write_report; from pathlib import Path; "
        "write_report([Path('results/published/cpu/2026-11-21/codes')], Path(sys.argv[1]) / 'r.html')",
    ],
    ids=["measures", "reports"],
)
def test_it_runs_with_nothing_else(work: str, tmp_path: Path) -> None:
    """No other distribution that is installed here can be found, whoever asks for it."""
    there = with_needs(list(BOX)) | {canonical(name) for name in wheels()} | {"fp8-harness"}
    absent = sorted(
        module
        for module, own in packages_distributions().items()
        if not {canonical(name) for name in own} & there and module.isidentifier()
    )
    box = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        f"absent = frozenset({absent!r})\n"
        "class Box(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name.partition('.')[0] in absent else super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Box\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", box + work, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
