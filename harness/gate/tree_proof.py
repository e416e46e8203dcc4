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
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from harness.gate.options import Exit, GateError
from harness.gate.trees import differing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

RECORDER = Path(__file__).with_name("recorder.py")
DOCUMENTS, TOOLING = (".md", ".rst"), (".github/", ".gitignore")  # no benchmark's time depends on them
PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
PACKAGE_FOLDERS = ("", "src/", "python/", "lib/")  # below a project, where its packages lie
TEST_FOLDERS = frozenset(("test", "tests", "bench", "benches", "benchmark", "benchmarks"))
TEST_NAMES = re.compile(r"conftest\.|test_|[^.]*_test\.|(pytest|tox)\.ini$")
INSTALLED = {"site-packages", "dist-packages"}
WAYS_OUT = (
    "let each work tree be imported: --command 'PYTHONPATH={where}:$PYTHONPATH ...', or an environment a tree: --setup 'python -m "
    "venv .venv && .venv/bin/pip install -e .' --command '.venv/bin/python ...'"
)
Files = frozenset[str]  # of a work tree, as paths below it


@dataclass(frozen=True)
class Proof:
    """What a run imported from files of its own tree.

    Attributes:
        count: modules, tests aside.
        names: their top-level modules, and the path of a script.
        tests: modules of test files, which prove nothing.
        changed: files of the change that were imported or opened, or whose build was.
    """

    count: int = 0
    names: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    changed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Trees:
    """The two work trees, the checkout that they come from, the files of each, and those in which they differ.

    Attributes:
        trees: by side.
        original: the checkout.
        files: by side, and of "original".
        changed: files whose bytes differ, documents and tests aside.
    """

    trees: Mapping[str, Path]
    original: Path
    files: Mapping[str, Files]
    changed: Files = frozenset()

    def check(self, side: str, imported: Collection[tuple[str, Path]]) -> Proof:
        """What a side imported from its own tree.

        Args:
            side: "baseline" or "candidate".
            imported: module names with their files, of all processes of one run; resolved paths.

        Raises:
            GateError: a module came from elsewhere though the tree holds it (exit 3); named with the way out.
        """
        own, mine = self.trees[side], self.files[side]
        modules, tests = set(), set()
        (other,) = (tree for name, tree in self.trees.items() if name != side)
        seen = set()
        for name, file in sorted(imported):
            inside, top = _below(file, own), name.partition(".")[0]
            if inside in self.changed:
                seen.add(inside)
            if not name:  # opened
                continue
            if inside is None:
                if where := self._elsewhere(side, name, file):
                    self._refuse(side, name, file, where)
            elif name == "__main__" and inside in mine:
                modules.add((name, inside))
            elif inside in mine and is_test(inside):
                tests.add(name)
            elif inside in mine or _holds(own, mine, name, file):
                modules.add((name, top))
                if inside not in mine and differing(
                    own, other, [inside]
                ):  # built, or installed, in each tree
                    seen.add(inside)
        names = tuple(sorted({top for _, top in modules}))
        return Proof(len(modules), names, tuple(sorted(tests)), frozenset(seen))

    def _elsewhere(self, side: str, name: str, file: Path) -> str:
        """The wrong place that holds a file which is not in the side's tree; "" where it is no wrong one."""
        for other, tree in self.trees.items():
            if other != side and _below(file, tree) is not None:
                return f"the work tree of the {other} (an install that both share?)"
        inside, known = _below(file, self.original), self.files["original"]
        if inside is not None and INSTALLED.isdisjoint(file.parts):
            # An extension is built beside its sources, and git ignores it.
            built = file.suffix in (".so", ".pyd") and _folder(inside) in map(_folder, known)
            if inside in known or built:
                return "the original checkout (an editable install?)"
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top == "__main__":
            return ""
        return "neither work tree" if _holds(self.trees[side], self.files[side], name, file) else ""

    def _refuse(self, side: str, name: str, file: Path, where: str) -> None:
        inside = next((i for t in (self.original, *self.trees.values()) if (i := _below(file, t))), "")
        folder = "."  # of the checkout, that holds the top-level package: "src"
        if inside and INSTALLED.isdisjoint(file.parts):
            up = len(name.split(".")) - (file.name.partition(".")[0] != "__init__")
            folder = "/".join(inside.split("/")[: -up - 1]) or "."
        raise GateError(
            Exit.INVALID,
            f"the {side} imported {name} from {file}, in {where}, so the two sides did not each run their own "
            f"code; {WAYS_OUT.format(where=folder)}",
        )


def _holds(tree: Path, files: Files, name: str, file: Path) -> bool:
    """Whether a tree holds a module under the name by which it was imported, wherever the file lies."""
    *folders, last = name.split(".")
    projects = _projects(tree, files)
    site = next((folder for folder in file.parents if folder.name in INSTALLED), None)
    return (
        name.partition(".")[0].lower() in projects
        or "/".join([*folders, *([last] if file.stem == "__init__" else []), file.name]) in _provided(files)
        or (site is not None and file.relative_to(site).as_posix() in _recorded(site, projects))
    )


@cache
def _projects(tree: Path, files: Files) -> Files:
    """Import names that the names of the tree's own projects suggest."""
    names = set()
    for file in files:
        if file.rpartition("/")[2] == "pyproject.toml" and not is_test(file):
            try:
                project = tomllib.loads((tree / file).read_text(encoding="utf-8"))["project"]
                names.add(_import_name(str(project["name"])))
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return frozenset(names)


@cache
def _recorded(site: Path, projects: Files) -> Files:
    """Installed files of the distributions that are named as these projects: their modules may have other names."""
    records = (
        r
        for r in site.glob("*.dist-info/RECORD")
        if _import_name(r.parent.stem.partition("-")[0]) in projects
    )
    texts = (record.read_text(encoding="utf-8", errors="replace") for record in records)
    return frozenset(line.split(",")[0] for text in texts for line in text.splitlines())


@cache
def _provided(files: Files) -> Files:
    """Files of a tree relative to the folders that packages may be imported from.

    A file below the root of a project, or one of its usual folders; and any other with its package's folder: a package
    may lie anywhere, unless within another package or among tests.
    """
    projects = {"", *(_folder(f) + "/" for f in files if f.rpartition("/")[2] in PROJECT_FILES)}
    roots = {("" if p == "/" else p) + folder for p in projects for folder in PACKAGE_FOLDERS}
    found = {f[len(root) :] for root in roots for f in files if f.startswith(root)}
    packages = {_folder(f) for f in files if f.endswith("/__init__.py")}
    for parts in (f.split("/") for f in files):
        for i in range(1, len(parts) - 1):
            if parts[i - 1] in TEST_FOLDERS or "/".join(parts[:i]) in packages:
                break
            found.add("/".join(parts[i:]))
    return frozenset(found)


def read_modules(folder: Path) -> set[tuple[str, Path]]:
    """Modules and their files, of all processes that wrote into a folder."""
    texts = (r.read_text(encoding="utf-8", errors="surrogateescape") for r in folder.glob("*.modules"))
    parts = (line.partition("\t") for text in texts for line in text.split("\n"))
    return {(name, Path(file)) for name, _, file in parts if file}


def _below(file: Path, tree: Path) -> str | None:
    """The path below a tree; None where it is not."""
    text, root = str(file), str(tree) + os.sep
    return text[len(root) :].replace(os.sep, "/") if text.startswith(root) else None


def _folder(inside: str) -> str:
    return inside.rpartition("/")[0]


def is_test(inside: str) -> bool:
    """Whether a file of a tree is part of its tests, by its name or its folders."""
    *folders, name = inside.split("/")
    return not TEST_FOLDERS.isdisjoint(folders) or bool(TEST_NAMES.match(name))


def is_code(inside: str) -> bool:
    """Whether a time may depend on a file: on no document, nor on what only git and GitHub read."""
    return not inside.endswith(DOCUMENTS) and not inside.startswith(TOOLING)


def may_be_code(inside: str, files: Files) -> bool:
    """Whether what only its folder calls a test may be code that users import, as `pkg/bench/timer.py` or `bench/timer.py`.

    So it may where that folder lies in a package, and where it is a package of benchmarks itself.
    """
    *folders, name = inside.split("/")

    def package(depth: int) -> bool:
        return "/".join([*folders[:depth], "__init__.py"]) in files

    return not TEST_NAMES.match(name) and any(
        folder in TEST_FOLDERS and ((i and package(i)) or (folder.startswith("bench") and package(i + 1)))
        for i, folder in enumerate(folders)
    )


def _import_name(project: str) -> str:
    return re.sub(r"[-.]+", "_", project).lower()


def unproven(sides: Iterable[str], tests: Sequence[str] = ()) -> GateError:
    """The refusal where a side imported no module of its tree, or only test files."""
    which = " and the ".join(sides)
    if tests:
        why = (
            f"of the tree of the {which} only test files were imported ({', '.join(tests[:4])}), so the code that they test "
            f"may be an installed copy; {WAYS_OUT.format(where='.')}; or --unproven-tree ok"
        )
    else:
        why = (
            f"no Python process of the {which} reported a module file of it; a command that sets PYTHONPATH has to keep what "
            "is there (PYTHONPATH=src:$PYTHONPATH), and one that is not Python needs --unproven-tree ok and has to run what "
            "lies in its current directory"
        )
    return GateError(Exit.INCONCLUSIVE, f"could not prove that each side ran its own tree: {why}")
