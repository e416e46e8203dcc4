"""Gate: did this change make anything slower, larger or less exact? An answer whose error rates are known.

`judge` is a pure function of the store; `runner` measures and measures again. docs/gate.md says how it decides and how
often it is wrong.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.gate.options import SWEEP, Exit, GateError, Options
from harness.machine import raw_output
from harness.store.errors import UsageError
from harness.store.words import options_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from harness.gate.policy import Policy
    from harness.gate.render import GateAnswer
    from harness.gate.runner import Instrument, Session
    from harness.gate.sides import Side


OF_EACH = ("policy", "json", "markdown", "junit", "comment", "annotations", "results_dir")
COUNTS = ("pairs", "confirm_pairs", "budget_s")
BY_SWEEP = ("words", "machine_free", "blocks", *COUNTS)
BY_COMMIT = ("against", "tip", "even_if_equal")
TAKES = {  # what goes together, by what a gate is named after
    "--candidate": ("baseline", "candidate", "machine_free"),
    "--measure": ("measure", "baseline", *BY_SWEEP),
    "--against": (*BY_COMMIT, "alone", *BY_SWEEP),
    "--command": (*BY_COMMIT, "command", "setup", "unproven_tree", "accept_changed_benchmark", *COUNTS),
}


def main(argv: Sequence[str]) -> int:
    """`python -m harness gate`; returns an exit code of `Exit`."""
    from harness.gate.render import GateAnswer, clear_outputs, write_answer

    if (options := _parse(argv)) is None:
        return 0
    clear_outputs(
        options
    )  # before anything is read: whatever comes of this gate, no earlier one is taken for it
    try:
        answer = _answer(options)
        if answer is not None:
            write_answer(answer, options)
        return int(answer.code if answer is not None else Exit.OK)
    except UsageError as error:
        code = error.code if isinstance(error, GateError) else Exit.USAGE
        raw_output.refuse(error)
        write_answer(GateAnswer(code, f"no verdict (exit {int(code)})", str(error)), options)
        return int(code)
    except Exception as error:
        write_answer(GateAnswer(Exit.INTERNAL, "internal error (exit 7)", type(error).__name__), options)
        raise  # becomes that exit code


def _parse(argv: Sequence[str]) -> Options | None:
    """The options of a command line, whose words with a `=` belong to the sweep; None where help was asked for."""
    if (options := options_of(Options, argv, flags_only=True)) is None:
        return None
    for name in ("baseline", "candidate"):  # what to measure may follow a run
        given = getattr(options, name)
        words = [w for w in given[1:] if "=" in w and not Path(w).exists()]
        options.words += words
        setattr(options, name, [w for w in given if w not in words])
    if wrong := _contradiction(options):
        raise UsageError(f"{wrong}; see python -m harness gate --help")
    return options


def _contradiction(options: Options) -> str:
    """What of the words does not go together; "" where all does."""
    modes = [name for name in ("candidate", "against", "measure") if getattr(options, name)]
    if len(modes) != 1:
        return "choose one: --baseline RUN --candidate RUN, --against GIT_REV, or --measure [--baseline RUN]"
    mode = "--command" if options.against and options.command is not None else f"--{modes[0]}"
    unset = Options()
    for name in (each.name for each in fields(options)):
        if getattr(options, name) != getattr(unset, name) and name not in (*TAKES[mode], *OF_EACH):
            word = repr(options.words[0]) if name == "words" else f"--{name.replace('_', '-')}"
            return f"{word} does not go with {mode}"
    if options.candidate and not options.baseline:
        return "--candidate needs --baseline RUN"
    if options.command is not None and not options.command.strip():
        return "--command '': give the command to measure"
    for name in ("baseline", "candidate"):
        runs = getattr(options, name)
        if len(runs) > 1 and not is_file_list(runs):
            return f"--{name} {' '.join(runs)}: name one run, or pytest-benchmark files (.json)"
    if options.candidate and is_file_list(options.baseline) != is_file_list(options.candidate):
        return "--baseline and --candidate: name runs on both sides, or pytest-benchmark files on both"
    return ""


def is_file_list(names: Sequence[str]) -> bool:
    """Whether a side is named by pytest-benchmark files and not by a run."""
    return bool(names) and all(name.endswith(".json") for name in names)


def _answer(options: Options) -> GateAnswer | None:
    """Judges, after measuring where that is asked for; None where there was nothing to judge."""
    from harness.gate.judge import judge
    from harness.gate.policy import as_given, load_policy
    from harness.gate.render import GateAnswer

    policy = as_given(load_policy(options.policy), options)
    if options.against:
        return _measure_two(options)
    if options.measure:
        return _measure_one(options, policy)
    baseline, candidate = _side(options, "baseline"), _side(options, "candidate")
    return GateAnswer.of(judge(baseline, candidate, policy, machine_free=options.machine_free))


def _side(options: Options, role: Literal["baseline", "candidate"]) -> Side:
    from harness.gate.benchmark_files import side_of_files
    from harness.gate.sides import load_side

    names = getattr(options, role)
    if is_file_list(names):
        return side_of_files([Path(name) for name in names], role)
    return load_side(names[0], role, options.results_dir)


def _report(line: str) -> None:
    sys.stderr.write(line + "\n")


def _words(options: Options) -> list[str]:
    words = list(options.words)
    return words if any(word.startswith("sweep=") for word in words) else [SWEEP, *words]


def _session(
    options: Options, policy: Policy, instrument: Instrument, stored: str | None = None, notes: tuple[str, ...] = ()
) -> Session:  # fmt: skip
    from harness.gate.runner import Session

    results = options.results_dir.resolve() if options.against else options.results_dir
    return Session(instrument, policy, results, stored, options.machine_free, notes, report=_report)


def _measure_one(options: Options, policy: Policy) -> GateAnswer | None:
    """Measures this work tree alone, and judges it by a stored run if one is named."""
    from harness.gate.render import GateAnswer
    from harness.gate.runner import SideError
    from harness.gate.sides import load_side
    from harness.gate.sweeping import Sweeping

    stored = options.baseline[0] if options.baseline else None
    sweep = Sweeping({"candidate": Path(__file__).resolve().parents[2]}, _words(options), policy.blocks)
    session = _session(options, policy, sweep, stored)
    if stored is not None:
        load_side(stored, "baseline", options.results_dir)  # refused before minutes are spent
        return GateAnswer.of(session.run())
    try:
        session.stage(1, policy.pairs)
    except SideError as error:
        raise GateError(Exit.USAGE, str(error)) from error
    sys.stdout.write(f"measured, with no baseline to judge by\nresults  {session.folder / 'candidate'}\n")
    return None


def _measure_two(options: Options) -> GateAnswer | None:
    """Measures this work tree and another commit by a sweep or a command, and judges."""
    from harness.gate import command, trees
    from harness.gate.policy import DEFAULT, as_given
    from harness.gate.ran import SideFiles
    from harness.gate.render import GateAnswer
    from harness.gate.sweeping import Sweeping

    by_command = options.command is not None
    root = trees.users_root() if by_command else trees.project_root()
    commits = {
        "baseline": trees.commit_to_compare(root, str(options.against), tip=options.tip),
        "candidate": trees.commit_to_compare(root, "HEAD", tip=True),
    }
    same_in = f"the same in {commits['baseline'][:10]}"
    # What the gate itself writes below the user's root is part of neither side.
    files = (options.results_dir / "gate", options.json, options.markdown, options.junit, options.comment)
    written = [place for file in files if by_command and file and (place := trees.below(root, file))]
    with ExitStack() as stack:
        if by_command:
            stack.enter_context(command.contained())
        sides = {side: stack.enter_context(trees.work_tree(root, of)) for side, of in commits.items()}
        for side in sides if by_command else ():
            trees.add_submodules(root, sides[side], commits[side])
        copied = trees.copy_changes(root, sides["candidate"], written)
        measured = (".",) if by_command else trees.MEASURED
        walks = {side: trees.walk(tree, measured, written) for side, tree in sides.items()}
        is_same = not (trees.differing(*walks.values()) or options.even_if_equal)
        if is_same and not (by_command and trees.ignored(root)):
            return _same(f"{'all files' if by_command else ', '.join(measured)} are {same_in}")
        judges = (DEFAULT, ()) if by_command else (root / trees.POLICY, trees.JUDGES)
        base = trees.base_of(root, sides["baseline"], options.policy, *judges)
        policy = as_given(base.policy, options)
        instrument: Instrument
        if by_command:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gate-command-"))).resolve()
            instrument = command.commanded(
                options, root, {side: SideFiles(tree, walks[side]) for side, tree in sides.items()}, scratch
            )
            instrument.commits = {
                side: {"git_commit": of, "git_dirty": side == "candidate" and bool(copied)}
                for side, of in commits.items()
            }
        else:
            # What times them is the base commit's on both sides
            trees.replace_files(sides["baseline"], sides["candidate"], base.clock)
            own = partial(trees.replace_files, root, sides["candidate"], base.clock) if base.clock else None
            instrument = Sweeping(
                sides, _words(options), policy.blocks, commits, own, alone="cases" * options.alone
            )
        try:
            return GateAnswer.of(_session(options, policy, instrument, notes=base.notes).run())
        except command.NothingElseError as error:
            return _same(f"but for {error}, new files of the benchmark, all files are {same_in}")


def _same(what: str) -> GateAnswer:
    from harness.gate.render import GateAnswer

    return GateAnswer(Exit.OK, "OK", f"{what} and here, so nothing was measured (--even-if-equal measures)")
