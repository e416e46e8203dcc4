"""Base: what of a change would judge the change, and what of the commit before it judges in its place.

With `--against`, the policy is the base commit's, and so is the clock: both sides measure with its `harness/timing`. The
rest of the gate is this tree's, as it runs; where a change touches it, the verdict says so.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.gate.exit_code import Exit, GateError, Loud
from harness.gate.policy import load_policy
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from harness.gate.policy import Policy

CLOCK = "harness/timing"
POLICY = "harness/gate/policy.yaml"
JUDGES = ("harness/gate", CLOCK, "harness/store", "harness/machine", ".ci/gate", ".ci/gate-policy.yaml")
OWN_POLICY = "{} is not in the base commit, so the change brings its own policy; the default policy judges"
SHOWN = 8  # files that a note names
ANEW = (
    "land that change by itself and gate the rest against it, or measure both commits, each with its own: "
    "python -m harness sweep=NAME at each, then gate --baseline RUN --candidate RUN"
)


@dataclass(frozen=True, slots=True)
class Base:
    """What the base commit lends to the judgement.

    Attributes:
        policy: the base commit's, with what it has of the policy file that was named; none that the change brings.
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
        GateError: the base's policy can't be read by this gate (exit 5).
    """
    relative = "" if named is None else _relative(root, named)
    changed = _changed(root, tree, [*JUDGES, *([relative] if relative else [])])
    policy, missing, _ = base_policy(root, tree, named, root / POLICY, changed=bool(changed), way_out=ANEW)
    clock = tree if any(name.startswith(CLOCK) for name in changed) else None
    notes = [Loud(f"JUDGE CHANGED: {OWN_POLICY.format(missing)}")] if missing else []
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        notes.append(
            Loud(
                f"JUDGE CHANGED: this change touches what judges it ({', '.join(changed[:SHOWN])}{more}); policy and {CLOCK} "
                "are the base commit's on both sides, the rest is this tree's: read those changes"
            )
        )
    return Base(policy, clock, tuple(notes))


def base_policy(
    root: Path, tree: Path, named: Path | None, default: Path, *, changed: bool, way_out: str
) -> tuple[Policy, str, tuple[str, ...]]:
    """The policy that judges: no change is judged by a policy that it brings.

    Args:
        root: the work tree that is judged.
        tree: the base commit's.
        named: the policy file of the command line; part of the change where it lies below `root`.
        default: the policy that is put under it; likewise.
        changed: the change touches something else that judges it.
        way_out: of a policy that can't be read.

    Returns:
        The policy; the path of the one that is named and that the base commit lacks, or ""; and the paths of those that
        the change touches.

    Raises:
        UsageError: a policy that can't be read.
        GateError: likewise, and the change may be why (exit 5).
    """
    own, relative, missing = below(root, default), "" if named is None else _relative(root, named), ""
    if own and (tree / own).is_file():
        default = tree / own
    if relative:
        named = tree / relative
        if not named.is_file():
            named, missing = None, relative
    touched = tuple(
        path
        for path in dict.fromkeys((own, relative))
        if path and (tree / path).is_file() and _content(root / path) != _content(tree / path)
    )
    try:
        return load_policy(named, default), missing, touched
    except UsageError as error:
        if not (changed or missing or touched):
            raise
        why = f"this gate cannot read the policy of the base commit ({error})"
        raise GateError(Exit.NO_BASELINE, f"{why}; {way_out}") from error


def below(root: Path, path: Path) -> str:
    """A path below a root, its own links not followed; "" where it is not."""
    whole, root = path.parent.resolve() / path.name, root.resolve()
    return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else ""


def _relative(root: Path, named: Path) -> str:
    return below(root, named) or below(root, named.resolve())


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
