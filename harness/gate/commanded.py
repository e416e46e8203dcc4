"""Commanded: `gate --against REV --command CMD`, for the repository in which it is typed.

Both sides are measured in work trees of their own: the merge base, and HEAD with what is not committed copied in. Neither
is the checkout itself, so that an import from the checkout shows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from harness.gate import against
from harness.gate.broken import judge_failed_command
from harness.gate.command_session import BenchmarkCommand, contained, prepare_trees
from harness.gate.drive import Request, measure_and_judge
from harness.gate.session import SideError
from harness.gate.tree_proof import Trees

if TYPE_CHECKING:
    import argparse

    from harness.gate.judge import Judgement
    from harness.gate.policy import Policy
    from harness.gate.session import Tell


def measure_command(options: argparse.Namespace, policy: Policy, typed: str, tell: Tell) -> Judgement | None:
    """Measures and judges a command; None where the two sides are the same files.

    Raises:
        GateError: no such commit, or the command decides nothing; see `CommandSession`.
    """
    root = against.users_root()
    commit = against.resolve(root, options.against)
    if not options.tip:
        commit = against.merge_base(root, commit)
    if against.same_code(root, commit, (".",)) and not options.even_if_equal:
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
        against.copy_changes(root, candidate)
        trees = {"baseline": baseline.resolve(), "candidate": candidate.resolve()}
        files = {name: against.files_of(tree) for name, tree in {**trees, "original": root}.items()}
        benchmark = BenchmarkCommand(
            options.command,
            Trees(trees, root, files),
            inside=str(Path.cwd().resolve().relative_to(root)),
            scratch=Path(scratch).resolve(),
            commits={side: against.commit_of(tree) for side, tree in trees.items()},
            unproven_ok=options.unproven_tree == "ok",
        )
        words = ["--command", options.command]
        request = Request(trees, words, policy, results, command=typed, benchmark=benchmark)
        if options.setup is not None:
            try:
                prepare_trees(options.setup, benchmark, tell)
            except SideError as error:
                return judge_failed_command(trees, options.setup, error.side, error.reason)
        return measure_and_judge(request, tell)
