"""What a GPU session imports where nothing can be fetched. Oracle: a finder that hides every other package.

Such a box has torch and what comes with it, and the packages of `BOX`; the rest travels as the wheels of `make wheels`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from wheel_alone import closure

ROOT = Path(__file__).parents[3]
# What a box made for torch has beside it, by distribution; jinja2 and numpy's like come with these.
BOX = ("torch", "triton", "numpy", "pandas", "pyarrow", "matplotlib", "jinja2", "rich", "pyyaml", "psutil",
       "nvidia-ml-py", "scipy", "pytest", "pytest-benchmark", "packaging", "typing_extensions")  # fmt: skip


def wheels() -> list[str]:
    """Distributions that `make wheels` collects, as pip spells them."""
    rule = re.search(r"^wheels:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rule is not None
    words = rule[1].replace("\\\n", " ").split("-w wheels")[1].split()
    return [re.split(r"[=<>]", word.strip('"'))[0] for word in words]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def there() -> set[str]:
    return {*closure([*BOX, *wheels()])}


def test_every_package_is_on_the_box_or_among_the_wheels() -> None:
    """Every import is declared: test_dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*closure(project["dependencies"])} <= there(), "add what is missing to `make wheels`"


# It measures, and it reports
WORK = """
import harness.cli.run, harness.cli.doctor
from harness.cli.config import load
load(["sweep=quick"], lambda device: "cpu")
from harness.report import write_report
from pathlib import Path
write_report([Path("results/published/cpu/2026-11-21/codes")], Path(sys.argv[1]) / "r.html")
"""


def test_it_runs_with_nothing_else(tmp_path: Path) -> None:
    """No other distribution that is installed here can be found, whoever asks for it."""
    found = there() | {"fp8-harness"}
    absent = sorted(
        module
        for module, own in packages_distributions().items()
        if not {canonical(name) for name in own} & found and module.isidentifier()
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
        [sys.executable, "-c", box + WORK, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
