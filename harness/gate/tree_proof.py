"""Tree proof: whether a process ran the code of its own work tree, by the files of the modules that it imported.

An editable install points every process of an environment at one checkout: both sides would run it, and equal code is
never slower. So a module counts against a side where its file lies in the other side's tree or is a file of the original
checkout, or where the tree holds that module itself and another copy of it was imported.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.gate.codes import Exit, GateError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

RECORDER = Path(__file__).with_name("recorder.py")
VARIABLE = "HARNESS_GATE_RECORD"
PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
PACKAGE_FOLDERS = ("", "src/", "python/", "lib/")  # below a project, where its packages lie
INSTALLED = ("site-packages", "dist-packages")
WAYS_OUT = (
    "let each work tree be imported: --command 'PYTHONPATH={where}:$PYTHONPATH ...', or an environment a tree: --setup 'python -m "
    "venv .venv && .venv/bin/pip install -e .' --command '.venv/bin/python ...'"
)


@dataclass(frozen=True)
class Trees:
    """The two work trees, the checkout that they come from, and the files of each."""

    trees: Mapping[str, Path]
    original: Path
    files: Mapping[str, frozenset[str]]  # by side, and "original": paths below the tree

    def check(self, side: str, imported: Collection[tuple[str, Path]]) -> int:
        """How many modules a side imported from files of its own tree.

        Args:
            side: "baseline" or "candidate".
            imported: module names with their files, of all processes of one run; resolved paths.

        Raises:
            GateError: a module came from elsewhere though the tree holds it (exit 3); named with the way out.
        """
        own = self.trees[side]
        mine, provided, project = self.files[side], self._provided(side), _project_name(own)
        proven = 0
        for name, file in sorted(imported):
            inside = _below(file, own)
            if inside is not None:
                proven += inside in mine or (
                    _is_installed(inside) and name.partition(".")[0].lower() == project
                )
                continue
            elsewhere = self._where(side, file)
            top = name.partition(".")[0]
            if not elsewhere and top not in sys.stdlib_module_names and top != "__main__":
                folders = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
                if top.lower() == project or "/".join([*folders, file.name]) in provided:
                    elsewhere = "neither work tree"
            if elsewhere:
                where = self._import_folder(name, file)
                raise GateError(
                    Exit.INVALID,
                    f"the {side} imported {name} from {file}, in {elsewhere}, so the two sides did not each run their own "
                    f"code; {WAYS_OUT.format(where=where)}",
                )
        return proven

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

    def _provided(self, side: str) -> set[str]:
        """Files of a tree relative to the folders that packages may be imported from."""
        files = self.files[side]
        projects = {"", *(f.rpartition("/")[0] + "/" for f in files if f.rpartition("/")[2] in PROJECT_FILES)}
        roots = {("" if p == "/" else p) + folder for p in projects for folder in PACKAGE_FOLDERS}
        return {f[len(root) :] for root in roots for f in files if f.startswith(root)}

    def _import_folder(self, name: str, file: Path) -> str:
        """Folder of the checkout that holds the top-level package of a module: "src", "."."""
        inside = next((i for t in (self.original, *self.trees.values()) if (i := _below(file, t))), None)
        if inside is None or _is_installed(inside):
            return "."
        up = len(name.split(".")) - (not file.name.startswith("__init__."))
        parts = inside.split("/")[: -up - 1]
        return "/".join(parts) or "."


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


def _project_name(tree: Path) -> str:
    """The import name that the project's own name suggests; "" where none is declared."""
    try:
        declared = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
        name = str(declared["project"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return re.sub(r"[-.]+", "_", name).lower()


def unproven(sides: Iterable[str]) -> GateError:
    """The refusal where a side imported no module of its tree."""
    return GateError(
        Exit.INCONCLUSIVE,
        f"could not prove that each side ran its own tree: no Python process of the {' and the '.join(sides)} reported a "
        "module file of it; a command that sets PYTHONPATH has to keep what is there (PYTHONPATH=src:$PYTHONPATH), and one "
        "that is not Python needs --unproven-tree ok and has to run what lies in its current directory",
    )
