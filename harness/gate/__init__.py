"""Gate: did this change make anything slower, larger or less exact? An answer whose error rates are known.

`judge` is a pure function of the store; `drive` measures and measures again. docs/gate.md says how it decides and how
often it is wrong.
"""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.gate.exit_code import Exit, GateError
from harness.store.errors import UsageError
from harness.store.words import Parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Literal

    from harness.gate.judge import Judgement
    from harness.gate.policy import Policy
    from harness.gate.sides import Side

SWEEP = "sweep=gate"
OF_TWO_TREES = (
    "alone",
    "even_if_equal",
    "tip",
    "dry_run",
    "command",
)  # likewise, where two sides are measured
OF_A_COMMAND = ("setup", "unproven_tree")


def main(argv: Sequence[str]) -> int:
    """`python -m harness gate`; returns the exit code of `codes.Exit`."""
    from harness.gate.outputs import clear_outputs, write_without_units

    options = _parse(argv)
    clear_outputs(
        options
    )  # before anything is read: whatever comes of this gate, no earlier one is taken for it
    try:
        return int(_gate(options, argv))
    except UsageError as error:
        code = error.code if isinstance(error, GateError) else Exit.USAGE
        sys.stderr.write(f"error: {error}\n")
        write_without_units(code, f"no verdict (exit {int(code)})", str(error), options)
        return int(code)
    except Exception as error:
        head = f"internal error (exit {int(Exit.INTERNAL)})"
        write_without_units(Exit.INTERNAL, head, type(error).__name__, options)
        raise  # becomes that exit code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "gate",
        "Verdicts on a change: REGRESSED, OK, IMPROVED or INCONCLUSIVE, case by case.",
        "exit: 0 ok, 1 regression, 2 usage, 3 invalid environment or control moved, 4 numerics, 5 baseline "
        "missing, 6 could not judge: too little of the times was decided, 7 internal error",
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help=f"what to measure (default: {SWEEP})")
    parser.add_argument(
        "--baseline",
        nargs="+",
        metavar="RUN",
        help="a stored run (folder, Parquet file or run id), or pytest-benchmark files of as many processes",
    )
    parser.add_argument(
        "--candidate", nargs="+", metavar="RUN", help="a stored run, or as many files, to be judged"
    )
    parser.add_argument(
        "--against",
        metavar="GIT_REV",
        help="measure this work tree and the commit where it left that one (their merge base), paired",
    )
    parser.add_argument("--tip", action="store_true", help="compare with GIT_REV itself, not the merge base")
    parser.add_argument(
        "--command",
        metavar="CMD",
        help="with --against, in any repository: a shell line that writes pytest-benchmark JSON to {out}, or, without {out}, "
        "whose wall time is judged",
    )
    parser.add_argument("--setup", metavar="CMD", help="with --command: run once in each work tree before")
    parser.add_argument(
        "--unproven-tree",
        choices=("refuse", "ok"),
        help="with --command, where no Python process imports a file of its work tree (default: refuse)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print how many rounds a decision takes; measure nothing"
    )
    parser.add_argument(
        "--measure", action="store_true", help="measure this work tree alone; judge by --baseline"
    )
    parser.add_argument(
        "--machine-free", action="store_true", help="judge no times but ratios, numerics and counts"
    )
    parser.add_argument("--policy", type=Path, metavar="FILE", help="YAML; the default documents its keys")
    parser.add_argument("--pairs", type=int, help="rounds: pairs of fresh processes (policy: pairs)")
    parser.add_argument(
        "--confirm-pairs", type=int, help="rounds of the confirmation (policy: confirm_pairs)"
    )
    parser.add_argument("--blocks", type=int, help="blocks of each arm in a round (policy: blocks)")
    parser.add_argument(
        "--budget-s", type=float, help="seconds that measuring may take, 0: no limit (policy: budget_s)"
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="one process at a time: where two do not fit into the device's memory",
    )
    parser.add_argument(
        "--even-if-equal", action="store_true", help="measure though no measured file differs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write them as markdown")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write them as JUnit XML")
    parser.add_argument(
        "--comment", type=Path, metavar="FILE", help="write the body of a comment on a pull request"
    )
    parser.add_argument(
        "--annotations", action="store_true", help="print GitHub's ::error and ::warning lines too"
    )
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    options = parser.parse_intermixed_args(list(argv))
    from harness.gate.policy import MEASURING

    for name in ("baseline", "candidate"):  # what to measure may follow a run
        given = getattr(options, name) or []
        words = [w for w in given[1:] if "=" in w and not Path(w).exists()]
        options.words += words
        names = [w for w in given if w not in words]
        if len(names) > 1 and not is_file_list(names):
            parser.error(f"--{name} {' '.join(names)}: name one run, or pytest-benchmark files (.json)")
        setattr(options, name, names)
    ways = [w for w in ("candidate", "against", "measure") if getattr(options, w)]
    if len(ways) != 1:
        parser.error(
            "choose one: --baseline RUN --candidate RUN, --against GIT_REV, or --measure [--baseline RUN]"
        )
    if options.candidate and not options.baseline:
        parser.error("--candidate needs --baseline RUN")
    if options.baseline and options.against:
        parser.error("--against measures its own baseline; leave --baseline out")
    if is_file_list(options.baseline) != is_file_list(options.candidate) and options.candidate:
        parser.error("--baseline and --candidate: name runs on both sides, or pytest-benchmark files on both")
    if options.words and not (options.against or options.measure):
        parser.error(f"{options.words[0]!r}: only --against and --measure take what to measure")
    for name in (*MEASURING, *OF_TWO_TREES):
        takes, who = bool(options.against), "--against takes"
        if name in MEASURING:
            takes, who = takes or options.measure, "--against and --measure take"
        given = getattr(options, name)
        if given is not None and given is not False and not takes:  # 0 is an answer too
            parser.error(f"--{name.replace('_', '-')} is about measuring: only {who} it")
    _check_command(parser, options)
    for name in ("pairs", "confirm_pairs", "blocks"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    if options.budget_s is not None and not 0 <= options.budget_s < math.inf:
        parser.error(f"--budget-s {options.budget_s} must be a number of seconds, 0 for no limit")
    return options


def _check_command(parser: Parser, options: argparse.Namespace) -> None:
    """Refuses what does not go with --command, or not without it."""
    if options.command is None:
        for name in OF_A_COMMAND:
            if getattr(options, name) is not None:
                parser.error(f"--{name.replace('_', '-')} goes with --command")
        return
    if not options.command.strip():
        parser.error("--command '': give the command to measure")
    if options.words:
        parser.error(f"{options.words[0]!r}: a sweep is measured, or --command, not both")
    for name in ("alone", "blocks", "dry_run", "machine_free"):
        if getattr(options, name):
            why = {
                "dry_run": "how many benchmarks a command writes is known only when it ran",
                "machine_free": "a command has times alone",
            }.get(name, "a command always runs alone, once a side and round")
            parser.error(f"--{name.replace('_', '-')} does not go with --command: {why}")


def _gate(options: argparse.Namespace, argv: Sequence[str]) -> Exit:
    from harness.gate.judge import judge
    from harness.gate.policy import as_given, load_policy

    policy = as_given(load_policy(options.policy), options)
    if options.candidate:
        judgement: Judgement | None = judge(
            _side(options.baseline, "baseline", options.results_dir),
            _side(options.candidate, "candidate", options.results_dir),
            policy,
            machine_free=options.machine_free,
        )
    else:
        judgement = _measure(options, policy, _without_budget(argv))
    return Exit.OK if judgement is None else _tell(judgement, options)


def _side(names: Sequence[str], role: Literal["baseline", "candidate"], results_dir: Path) -> Side:
    from harness.gate.benchmark_files import side_of_files
    from harness.gate.sides import load_side

    if is_file_list(names):
        return side_of_files([Path(name) for name in names], role)
    return load_side(names[0], role, results_dir)


def _without_budget(argv: Sequence[str]) -> str:
    """The command as it was typed, without its budget, for advice that can be copied."""
    words = list(argv)
    if "--budget-s" in words:
        del words[words.index("--budget-s") : words.index("--budget-s") + 2]
    words = [word for word in words if not word.startswith("--budget-s=")]
    return f"python -m harness gate {shlex.join(words)}"


def _measure(options: argparse.Namespace, policy: Policy, command: str) -> Judgement | None:
    """Measures as asked; None where there was nothing to judge."""
    from harness.gate import against
    from harness.gate.base import base_of
    from harness.gate.drive import Request, measure_and_judge, open_session, print_plan
    from harness.gate.policy import as_given
    from harness.gate.session import SideError
    from harness.gate.sides import load_side

    if options.command is not None:
        from harness.gate.commanded import measure_command

        return measure_command(options, command, _tell_progress)
    root = Path(__file__).resolve().parent.parent.parent if options.measure else against.project_root()
    words = options.words or [SWEEP]
    words = words if any(w.startswith("sweep=") for w in words) else [SWEEP, *words]
    tell = _tell_progress
    if options.measure:
        request = Request(
            {"candidate": root},
            words,
            policy,
            options.results_dir,
            options.baseline[0] if options.baseline else None,
            options.machine_free,
            command=command,
        )
        if not options.baseline:
            session = open_session(request, tell)
            try:
                session.stage(1, policy.pairs)
            except SideError as error:
                raise GateError(Exit.USAGE, str(error)) from error
            sys.stdout.write(
                f"measured, with no baseline to judge by\nresults  {session.folder / 'candidate'}\n"
            )
            return None
        load_side(options.baseline[0], "baseline", options.results_dir)  # refused before minutes are spent
        return measure_and_judge(request, tell)
    commit = against.resolve(root, options.against)
    if not options.tip:
        commit = against.merge_base(root, commit)
    if options.dry_run:
        print_plan(root, words, policy)
        return None
    if against.same_code(root, commit) and not options.even_if_equal:
        tell_equal(f"{', '.join(against.MEASURED)} are the same in {commit[:10]} and here", options)
        return None
    with against.work_tree(root, commit) as tree:
        base = base_of(root, tree, options.policy)
        trees = {"baseline": tree, "candidate": root}
        request = Request(
            trees,
            words,
            as_given(base.policy, options),
            options.results_dir,
            machine_free=options.machine_free,
            alone=options.alone,
            command=command,
            clock_tree=base.clock,
            notes=base.notes,
        )
        return measure_and_judge(request, tell)


def _tell_progress(line: str) -> None:
    sys.stderr.write(line + "\n")


def tell_equal(what: str, options: argparse.Namespace) -> None:
    """Says OK where nothing that could be measured differs."""
    from harness.gate.outputs import write_without_units

    same = f"{what}, so nothing was measured (--even-if-equal measures)"
    sys.stdout.write(f"OK (exit 0): {same}\n")
    write_without_units(Exit.OK, "OK", same, options)


def _tell(judgement: Judgement, options: argparse.Namespace) -> Exit:
    from harness.gate import outputs, publish, render

    if options.annotations:
        sys.stdout.write(publish.github_lines(judgement))
    sys.stdout.write(render.terminal(judgement))
    sys.stdout.flush()
    outputs.write_judgement(judgement, options)
    return judgement.code


def is_file_list(names: Sequence[str]) -> bool:
    """Whether a side is named by pytest-benchmark files and not by a run."""
    return bool(names) and all(name.endswith(".json") for name in names)
