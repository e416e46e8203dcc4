"""Tree proof: whether a process ran the code of its own work tree, by the files of the modules that it imported.

An editable install points every process of an environment at one checkout: both sides would run it, and equal code is
never slower. So a module counts against a side where its file lies in the other side's tree or is a file of the original
checkout, or where the tree holds that module itself and another copy of it was imported.

A test file proves nothing of the code that it tests: pytest finds it by its path, and imports an installed copy of the rest.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.gate.exit_code import Exit, GateError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

RECORDER = Path(__file__).with_name("recorder.py")
VARIABLE = "HARNESS_GATE_RECORD"
PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
PACKAGE_FOLDERS = ("", "src/", "python/", "lib/")  # below a project, where its packages lie
TEST_FOLDERS = frozenset(("test", "tests", "bench", "benches", "benchmark", "benchmarks"))
INSTALLED = ("site-packages", "dist-packages")
WAYS_OUT = (
    "let each work tree be imported: --command 'PYTHONPATH={where}:$PYTHONPATH ...', or an environment a tree: --setup 'python -m "
    "venv .venv && .venv/bin/pip install -e .' --command '.venv/bin/python ...'"
)


@dataclass(frozen=True)
class Proof:
    """What a run imported from files of its own tree.

    Attributes:
        count: modules, tests aside.
        names: their top-level modules, and the path of a script.
        tests: modules of test files, which prove nothing.
    """

    count: int = 0
    names: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trees:
    """The two work trees, the checkout that they come from, and the files of each."""

    trees: Mapping[str, Path]
    original: Path
    files: Mapping[str, frozenset[str]]  # by side, and "original": paths below the tree

    def check(self, side: str, imported: Collection[tuple[str, Path]]) -> Proof:
        """What a side imported from its own tree.

        Args:
            side: "baseline" or "candidate".
            imported: module names with their files, of all processes of one run; resolved paths.

        Raises:
            GateError: a module came from elsewhere though the tree holds it (exit 3); named with the way out.
        """
        own, mine = self.trees[side], self.files[side]
        held = _Held(own, mine)
        modules, tests = set(), set()
        for name, file in sorted(imported):
            inside, top = _below(file, own), name.partition(".")[0]
            if inside is not None:
                if name == "__main__" and inside in mine:
                    modules.add((name, inside))
                elif inside in mine and _is_test(inside):
                    tests.add(name)
                elif inside in mine or held.has(name, file):
                    modules.add((name, top))
                continue
            elsewhere = self._where(side, file)
            if not elsewhere and top not in sys.stdlib_module_names and top != "__main__":
                elsewhere = "neither work tree" if held.has(name, file) else ""
            if elsewhere:
                where = self._import_folder(name, file)
                raise GateError(
                    Exit.INVALID,
                    f"the {side} imported {name} from {file}, in {elsewhere}, so the two sides did not each run their own "
                    f"code; {WAYS_OUT.format(where=where)}",
                )
        return Proof(len(modules), tuple(sorted({top for _, top in modules})), tuple(sorted(tests)))

    def _where(self, side: str, file: Path) -> str:
        """The wrong place that holds a file; "" where it is no wrong one."""
        for other, tree in self.trees.items():
            if other != side and _below(file, tree) is not None:
                return f"the work tree of the {other} (an install that both share?)"
        inside = _below(file, self.original)
        if inside is None or _is_installed(inside):
            return ""
        known = inside in self.files["original"]
        built = file.suffix in (".so", ".pyd") and any(
            name.rpartition("/")[0] == inside.rpartition("/")[0] for name in self.files["original"]
        )  # an extension that was built beside its sources, which git ignores
        return "the original checkout (an editable install?)" if known or built else ""

    def _import_folder(self, name: str, file: Path) -> str:
        """Folder of the checkout that holds the top-level package of a module: "src", "."."""
        inside = next((i for t in (self.original, *self.trees.values()) if (i := _below(file, t))), None)
        if inside is None or _is_installed(inside):
            return "."
        up = len(name.split(".")) - (not file.name.startswith("__init__."))
        parts = inside.split("/")[: -up - 1]
        return "/".join(parts) or "."


class _Held:
    """What a tree holds, by the names under which it would be imported."""

    def __init__(self, tree: Path, files: frozenset[str]) -> None:
        declared = [f for f in files if f.rpartition("/")[2] == "pyproject.toml" and not _is_test(f)]
        self._projects = {_project_name(tree / f) for f in declared} - {""}
        self._provided = _provided(files)
        self._recorded: dict[Path, frozenset[str]] = {}

    def has(self, name: str, file: Path) -> bool:
        """Whether a module is one of the tree's, wherever its file lies."""
        folders = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
        if name.partition(".")[0].lower() in self._projects:
            return True
        return "/".join([*folders, file.name]) in self._provided or self._is_recorded(file)

    def _is_recorded(self, file: Path) -> bool:
        """Whether an installed file belongs to a distribution that is named as a project of the tree."""
        site = next((folder for folder in file.parents if folder.name in INSTALLED), None)
        if site is None or not self._projects:
            return False
        if site not in self._recorded:
            records = [
                folder / "RECORD"
                for folder in site.glob("*.dist-info")
                if _import_name(folder.stem.partition("-")[0]) in self._projects
            ]
            texts = [path.read_text(encoding="utf-8", errors="replace") for path in records if path.is_file()]
            lines = [line for text in texts for line in text.splitlines()]
            self._recorded[site] = frozenset(line.split(",")[0] for line in lines)
        return file.relative_to(site).as_posix() in self._recorded[site]


def _provided(files: frozenset[str]) -> set[str]:
    """Files of a tree relative to the folders that packages may be imported from.

    A file below the root of a project, or one of its usual folders; and any other with its package's folder: a package
    may lie anywhere, unless within another package or among tests.
    """
    projects = {"", *(f.rpartition("/")[0] + "/" for f in files if f.rpartition("/")[2] in PROJECT_FILES)}
    roots = {("" if p == "/" else p) + folder for p in projects for folder in PACKAGE_FOLDERS}
    found = {f[len(root) :] for root in roots for f in files if f.startswith(root)}
    packages = {f.rpartition("/")[0] for f in files if f.endswith("/__init__.py")}
    for parts in (f.split("/") for f in files):
        for i in range(1, len(parts) - 1):
            if parts[i - 1] in TEST_FOLDERS or "/".join(parts[:i]) in packages:
                break
            found.add("/".join(parts[i:]))
    return found


def read_modules(folder: Path) -> set[tuple[str, Path]]:
    """Modules and their files, of all processes that wrote into a folder."""
    return {
        (name, Path(file))
        for record in folder.glob("*.modules")
        for name, _, file in (
            line.partition("\t")
            for line in record.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
        )
        if file
    }


def _below(file: Path, tree: Path) -> str | None:
    """The path below a tree; None where it is not."""
    text, root = str(file), str(tree) + os.sep
    return text[len(root) :].replace(os.sep, "/") if text.startswith(root) else None


def _is_installed(inside: str) -> bool:
    return any(name in inside.split("/") for name in INSTALLED)


def _is_test(inside: str) -> bool:
    """Whether a file of a tree is part of its tests, by its name or its folders."""
    *folders, name = inside.split("/")
    stem = name.partition(".")[0]
    by_name = stem == "conftest" or stem.startswith("test_") or stem.endswith("_test")
    return by_name or not TEST_FOLDERS.isdisjoint(folders)


def _import_name(project: str) -> str:
    return re.sub(r"[-.]+", "_", project).lower()


def _project_name(file: Path) -> str:
    """The import name that a project's own name suggests; "" where none is declared."""
    try:
        declared = tomllib.loads(file.read_text(encoding="utf-8"))
        name = str(declared["project"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return _import_name(name)


def unproven(sides: Iterable[str], tests: Sequence[str] = ()) -> GateError:
    """The refusal where a side imported no module of its tree, or only test files."""
    if tests:
        return GateError(
            Exit.INCONCLUSIVE,
            f"could not prove that each side ran its own tree: of the tree of the {' and the '.join(sides)} only test files "
            f"were imported ({', '.join(tests[:4])}), so the code that they test may be an installed copy; {WAYS_OUT.format(where='.')}; "
            "or --unproven-tree ok",
        )
    return GateError(
        Exit.INCONCLUSIVE,
        f"could not prove that each side ran its own tree: no Python process of the {' and the '.join(sides)} reported a "
        "module file of it; a command that sets PYTHONPATH has to keep what is there (PYTHONPATH=src:$PYTHONPATH), and one "
        "that is not Python needs --unproven-tree ok and has to run what lies in its current directory",
    )
