"""Gate: did this change make anything slower, larger or less exact? An answer whose error rates are known.

`judge` is a pure function of the store; `drive` measures and measures again. docs/gate.md says how it decides and how
often it is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from harness.gate.codes import Exit, GateError
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.gate.judge import Judgement
    from harness.gate.policy import Policy

SWEEP = "sweep=gate"
MEASURING = ("pairs", "confirm_pairs", "blocks", "budget_s")  # what says how to measure
OF_TWO_TREES = ("alone", "even_if_equal")  # likewise, where two sides are measured


def main(argv: Sequence[str]) -> int:
    """`python -m harness gate`; returns the exit code of `codes.Exit`."""
    try:
        return int(_gate(_parse(argv)))
    except GateError as error:
        sys.stderr.write(f"error: {error}\n")
        _summarise(f"### Gate: no verdict (exit {int(error.code)})\n\n{' '.join(str(error).split())}\n")
        return int(error.code)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m harness gate",
        description="Verdicts on a change: REGRESSED, OK, IMPROVED or INCONCLUSIVE, case by case.",
        epilog="exit: 0 ok, 1 regression, 2 usage, 3 invalid environment or control moved, 4 numerics, 5 baseline "
        "missing, 6 inconclusive where the policy says so, 7 internal error",
    )
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help=f"what to measure (default: {SWEEP})")
    parser.add_argument("--baseline", metavar="RUN", help="a stored run: folder, Parquet file or run id")
    parser.add_argument("--candidate", metavar="RUN", help="a stored run to be judged")
    parser.add_argument("--against", metavar="GIT_REV", help="measure that commit and this work tree, paired")
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
    parser.add_argument("--all", action="store_true", help="show every unit, also those that are OK")
    parser.add_argument("--history", nargs="+", metavar="RUN", help="draw the trend over stored runs instead")
    parser.add_argument("-o", "--output", type=Path, help="the trend page (default: reports/trend.html)")
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    options = parser.parse_intermixed_args(list(argv))
    ways = [w for w in ("candidate", "against", "measure", "history") if getattr(options, w)]
    if len(ways) != 1:
        parser.error(
            "choose one: --baseline RUN --candidate RUN, --against GIT_REV, --measure [--baseline RUN], or --history RUN..."
        )
    if options.candidate and not options.baseline:
        parser.error("--candidate needs --baseline RUN")
    if options.baseline and options.against:
        parser.error("--against measures its own baseline; leave --baseline out")
    if options.words and not (options.against or options.measure):
        parser.error(f"{options.words[0]!r}: only --against and --measure take what to measure")
    for name in (*MEASURING, *OF_TWO_TREES):
        takes, who = bool(options.against), "--against takes"
        if name in MEASURING:
            takes, who = takes or options.measure, "--against and --measure take"
        given = getattr(options, name)
        if given is not None and given is not False and not takes:  # 0 is an answer too
            parser.error(f"--{name.replace('_', '-')} is about measuring: only {who} it")
    for name in ("pairs", "confirm_pairs", "blocks"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    if options.budget_s is not None and not 0 <= options.budget_s < math.inf:
        parser.error(f"--budget-s {options.budget_s} must be a number of seconds, 0 for no limit")
    return options


def _gate(options: argparse.Namespace) -> Exit:
    from harness.gate.judge import judge
    from harness.gate.policy import load_policy
    from harness.gate.sides import load_side

    if options.history:
        from harness.gate.trend import write_trend

        page = write_trend(options.history, options.output or Path("reports/trend.html"), options.results_dir)
        sys.stdout.write(f"trend    {page}\n")
        return Exit.OK
    policy = load_policy(options.policy)
    given = {n: getattr(options, n) for n in MEASURING}
    policy = dataclasses.replace(
        policy, **{name: value for name, value in given.items() if value is not None}
    )
    _writable(options)
    if options.candidate:
        judgement: Judgement | None = judge(
            load_side(options.baseline, "baseline", options.results_dir),
            load_side(options.candidate, "candidate", options.results_dir),
            policy,
            machine_free=options.machine_free,
        )
    else:
        judgement = _measure(options, policy)
    return Exit.OK if judgement is None else _tell(judgement, options)


def _measure(options: argparse.Namespace, policy: Policy) -> Judgement | None:
    """Measures as asked; None where there was nothing to judge."""
    from harness.gate import against
    from harness.gate.drive import Request, measure_and_judge, open_session
    from harness.gate.sides import load_side

    root = Path(__file__).resolve().parent.parent.parent if options.measure else against.project_root()
    words = options.words or [SWEEP]
    words = words if any(w.startswith("sweep=") for w in words) else [SWEEP, *words]

    def tell(line: str) -> None:
        sys.stderr.write(line + "\n")

    if options.measure:
        request = Request(
            {"candidate": root},
            words,
            policy,
            options.results_dir,
            options.baseline,
            options.machine_free,
        )
        if not options.baseline:
            session = open_session(request, tell)
            session.stage(1, policy.pairs)
            sys.stdout.write(
                f"measured, with no baseline to judge by\nresults  {session.folder / 'candidate'}\n"
            )
            return None
        load_side(options.baseline, "baseline", options.results_dir)  # refused before minutes are spent
        return measure_and_judge(request, tell)
    commit = against.resolve(root, options.against)
    if against.same_code(root, commit) and not options.even_if_equal:
        same = (
            f"{', '.join(against.MEASURED)} are the same in {commit[:10]} and here, so nothing was measured "
            "(--even-if-equal measures)"
        )
        sys.stdout.write(f"OK (exit 0): {same}\n")
        _summarise(f"### Gate: OK\n\n{same}\n")
        return None
    with against.work_tree(root, commit) as tree:
        trees = {"baseline": tree, "candidate": root}
        request = Request(
            trees,
            words,
            policy,
            options.results_dir,
            machine_free=options.machine_free,
            alone=options.alone,
        )
        return measure_and_judge(request, tell)


def _tell(judgement: Judgement, options: argparse.Namespace) -> Exit:
    from harness.gate import render

    sys.stdout.write(render.terminal(judgement, everything=options.all))
    sys.stdout.flush()
    _summarise(render.markdown(judgement))
    for path, form in ((options.json, render.as_json), (options.markdown, render.markdown)):
        try:
            if path is not None:
                path.write_text(form(judgement), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write {path} ({error.strerror}); the verdict is printed above"
            ) from error
    return judgement.code


def _summarise(markdown: str) -> None:
    """Appends to the step summary of a GitHub job; elsewhere there is none."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if not summary:
        return
    try:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(markdown + "\n")
    except OSError as error:  # no verdict is worth less because a page could not show it
        sys.stderr.write(f"warning: cannot write the step summary {summary} ({error.strerror})\n")


def _writable(options: argparse.Namespace) -> None:
    """Refuses an output that can't be written before anything is measured."""
    for path in (options.json, options.markdown):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: {path.parent} is no folder")
        if path is not None and path.is_dir():
            raise UsageError(f"cannot write {path}: it is a folder")


class Parser(argparse.ArgumentParser):
    """Refuses in one line, as every other command does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")
