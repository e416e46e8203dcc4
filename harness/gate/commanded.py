"""Commanded: `gate --against REV --command CMD`, for the repository in which it is typed.

Both sides are measured in work trees of their own: the merge base, and HEAD with what is not committed copied in. Neither
is the checkout itself, so that an import from the checkout shows. What the gate writes is part of neither.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.gate import against
from harness.gate.base import OWN_POLICY, base_policy, below
from harness.gate.broken import judge_failed_command
from harness.gate.command_session import (
    BenchmarkCommand,
    CommandSession,
    prepare_trees,
    require_base_paths,
)
from harness.gate.drive import Request, measure_and_judge, open_session
from harness.gate.exit_code import Loud
from harness.gate.policy import DEFAULT, as_given
from harness.gate.session import SideError
from harness.gate.shell import Ran, contained
from harness.gate.tree_proof import Trees

if TYPE_CHECKING:
    import argparse

    from harness.gate.judge import Judgement
    from harness.gate.policy import Policy
    from harness.gate.session import Report


def measure_command(options: argparse.Namespace, typed: str, tell: Report) -> Judgement | None:
    """Measures and judges a command; None where the two sides are the same files.

    Raises:
        GateError: no such commit, or the command decides nothing; see `CommandSession`.
    """
    root = against.users_root()
    commit = against.resolve(root, options.against)
    if not options.tip:
        commit = against.merge_base(root, commit)
    written = _written(root, options)
    if against.same_code(root, commit, (".",), written) and not options.even_if_equal:
        from harness.gate import tell_equal

        tell_equal(f"all files are the same in {commit[:10]} and here", options)
        return None
    results = options.results_dir.resolve()
    with (
        contained(),
        tempfile.TemporaryDirectory(prefix="gate-command-") as scratch,
        against.work_tree(root, commit) as baseline,
        against.work_tree(root, against.resolve(root, "HEAD")) as candidate,
    ):
        against.copy_changes(root, candidate, written)
        trees = {"baseline": baseline.resolve(), "candidate": candidate.resolve()}
        files = {name: against.files_of(tree, written) for name, tree in {**trees, "original": root}.items()}
        benchmark = BenchmarkCommand(
            options.command,
            Trees(trees, root, files),
            inside=str(Path.cwd().resolve().relative_to(root)),
            scratch=Path(scratch).resolve(),
            commits={side: against.commit_of(tree) for side, tree in trees.items()},
            unproven_ok=options.unproven_tree == "ok",
        )
        words = ["--command", options.command]
        policy, notes = _policy(root, trees["baseline"], options)
        request = Request(trees, words, policy, results, command=typed, benchmark=benchmark, notes=notes)
        if options.setup is not None:
            try:
                prepare_trees(options.setup, benchmark, tell)
            except SideError as error:
                return _judge_set_up(request, error, options.setup, tell)
        return measure_and_judge(request, tell)


def _judge_set_up(request: Request, error: SideError, setup: str, tell: Report) -> Judgement:
    """The judgement where the set-up fails on one side: to mend it takes a candidate on which the command works too."""
    notes: list[str] = []
    if error.side == "baseline":
        session = open_session(request, tell)
        assert isinstance(session, CommandSession)
        ends = session.clock() + (request.policy.budget_s or math.inf)
        session.require_works("candidate", f"baseline: {error.reason}", ends)
        assert request.benchmark is not None
        require_base_paths(request.benchmark, error.reason)
        notes = session.notes()
    judgement = judge_failed_command(request.trees, setup, error.side, error.reason, Ran.SET_UP)
    return replace(judgement, notes=(*judgement.notes, *notes, *request.notes))


def _policy(root: Path, tree: Path, options: argparse.Namespace) -> tuple[Policy, tuple[str, ...]]:
    """The policy that judges, and what has to be said of it: no change is judged by a policy that it brings.

    Args:
        root: the work tree that is judged.
        tree: the base commit's.
        options: `policy`, a file that is part of the change where it lies below `root`, and what says how to measure.

    Raises:
        GateError: the base commit's policy can't be read by this gate (exit 5).
    """
    way_out = "land the change of the policy by itself"
    policy, missing, touched = base_policy(
        root, tree, options.policy, DEFAULT, changed=False, way_out=way_out
    )
    notes = [
        Loud(
            f"JUDGE CHANGED: this change touches {'' if path == below(root, DEFAULT) else 'its policy '}{path}; "
            "the base commit's judges"
        )
        for path in touched
    ]
    if missing:
        kept = "(a policy of yours: land it first, or keep it outside of the repository)"
        notes.append(Loud(f"JUDGE CHANGED: {OWN_POLICY.format(missing)} {kept}"))
    return as_given(policy, options), tuple(notes)


def _written(root: Path, options: argparse.Namespace) -> tuple[str, ...]:
    """What the gate itself writes below the user's root, of this call and of earlier ones."""
    paths = [options.results_dir / "gate", options.json, options.markdown, options.junit, options.comment]
    return tuple(filter(None, (below(root, path) for path in paths if path is not None)))
