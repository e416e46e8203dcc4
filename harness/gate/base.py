"""Base: what of a change would judge the change, and what of the commit before it judges in its place.

With `--against`, the policy is the base commit's, and so is the clock: both sides measure with its `harness/timing`. The
rest of the gate is this tree's, as it runs; where a change touches it, the verdict says so.
"""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.gate.codes import LOUD, Exit, GateError
from harness.gate.policy import load_policy
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from harness.gate.policy import Policy

CLOCK = "harness/timing"
POLICY = "harness/gate/policy.yaml"
JUDGES = ("harness/gate", CLOCK, "harness/store", "harness/machine", ".ci/gate", ".ci/gate-policy.yaml")
SHOWN = 8  # files that a note names
ANEW = (
    "land that change by itself and gate the rest against it, or measure both commits, each with its own: "
    "python -m harness sweep=NAME at each, then gate --baseline RUN --candidate RUN"
)


@dataclass(frozen=True, slots=True)
class Base:
    """What the base commit lends to the judgement.

    Attributes:
        policy: the base commit's, with what it has of the policy file that was named.
        clock: the base commit's tree where its `harness/timing` differs, for both sides to measure with.
        notes: what of the judge the change touches; nothing where it touches none of it.
    """

    policy: Policy
    clock: Path | None
    notes: tuple[str, ...]


def base_of(root: Path, tree: Path, named: Path | None) -> Base:
    """Compares the judges of a work tree and of the base commit's tree.

    Args:
        root: the work tree that is judged.
        tree: the base commit's.
        named: the policy file of the command line.

    Raises:
        GateError: the base's policy can't be read by this gate, or its clock lacks what this tree asks of it (exit 5).
    """
    inside = named is not None and named.resolve().is_relative_to(root.resolve())
    relative = str(named.resolve().relative_to(root.resolve())) if named is not None and inside else ""
    changed = _changed(root, tree, [*JUDGES, *([relative] if relative else [])])
    over, unchecked = named, ""
    if relative and (tree / relative).exists():
        over = tree / relative
    elif relative:
        unchecked = f"{relative} is not in the base commit, so the change brings its own policy"
    default = tree / POLICY if (tree / POLICY).exists() else root / POLICY
    try:
        policy = load_policy(over, default)
    except UsageError as error:
        if not changed:
            raise
        why = f"this gate cannot read the policy of the base commit ({error})"
        raise GateError(Exit.NO_BASELINE, f"{why}; {ANEW}") from error
    clock = tree if any(name.startswith(CLOCK) for name in changed) else None
    if clock is not None and (lacks := clock_lacks(root, tree)):
        what = f"the base commit's {CLOCK}, by which both sides are to be measured, lacks {lacks}"
        raise GateError(Exit.NO_BASELINE, f"{what}, which this tree imports; {ANEW}")
    notes = [f"{LOUD[1]}: {unchecked}"] if unchecked else []
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        notes.append(
            f"{LOUD[1]}: this change touches what judges it ({', '.join(changed[:SHOWN])}{more}); policy and {CLOCK} "
            "are the base commit's on both sides, the rest is this tree's: read those changes"
        )
    return Base(policy, clock, tuple(notes))


def clock_lacks(root: Path, tree: Path) -> str:
    """The first name that a tree's harness imports from `harness.timing` and another tree's does not have; or ""."""
    for path in sorted((root / "harness").rglob("*.py")):
        if path.is_relative_to(root / CLOCK) or "harness.timing" not in (
            text := path.read_text(encoding="utf-8")
        ):
            continue
        for node in ast.walk(ast.parse(text)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if not module.startswith("harness.timing") or not isinstance(node, ast.ImportFrom):
                continue
            file = tree.joinpath(*module.split("."))
            for name in (alias.name for alias in node.names):
                if file.is_dir() and (
                    (file / f"{name}.py").exists() or name in _defined(file / "__init__.py")
                ):
                    continue
                if name not in _defined(file.with_suffix(".py")):
                    return f"{module}.{name}"
    return ""


def _defined(path: Path) -> set[str]:
    """Names that a module has at its top."""
    if not path.exists():
        return set()
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _changed(root: Path, tree: Path, paths: list[str]) -> list[str]:
    """Files below some paths that differ between two trees as they lie there, by name."""
    listed = [
        subprocess.run(
            ["git", "-C", str(one), "ls-files", "-co", "--exclude-standard", "--", *paths],
            capture_output=True, text=True, check=True,
        ).stdout.splitlines()
        for one in (root, tree)
    ]  # fmt: skip
    return sorted(
        {name for names in listed for name in names if _content(root / name) != _content(tree / name)}
    )


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
