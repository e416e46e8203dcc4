"""Render: an answer of the gate as a terminal table, JSON, markdown, JUnit XML, a comment and GitHub's annotations; and where.

A form says of everything what the exit code says: what failed the gate is a failure, what was not decided is skipped
and never passed, and where there is no verdict the form says so, so that none of an earlier gate is taken for it.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from harness.gate.decide import UnitVerdict
from harness.gate.options import Exit, Loud
from harness.gate.sides import differing_fields
from harness.gate.unit import RATIO, UnitState
from harness.store import printer, run_files, text
from harness.store.errors import UsageError
from harness.store.measurement import to_json
from harness.store.parquet import find_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.gate.options import Options
    from harness.gate.unit import Judgement, Unit

FORMAT = 1  # of the JSON
ORDER = (UnitVerdict.REGRESSED, UnitVerdict.INCONCLUSIVE, UnitVerdict.IMPROVED, UnitVerdict.OK)
SHOWN = 60  # rows of a table; the JSON holds all
MOST_COMMENT = 60_000  # characters; GitHub takes 65,536
MOST_ANNOTATIONS = 10  # errors that GitHub shows of a step; the last one says how many more there are
HEADLINE = {
    Exit.OK: "OK",
    Exit.REGRESSED: "REGRESSED",
    Exit.INVALID: "INVALID: the machine changed",
    Exit.NUMERICS: "NUMERICS FAIL",
    Exit.INCONCLUSIVE: "INCONCLUSIVE",
}
MODES = {
    "paired": "rounds measured together, pair by pair",
    "alone": "in each round one side after the other, so that a drift cancels less",
    "stored": "two stored runs, not measured together; the tolerance is widened by session_spread",
    "machine-free": "what no machine changes, and ratios within each run",
    "broken": "one side does not run, so nothing was measured",
}
_FILE = re.compile(r"([\w./-]+\.py)::")
DATA, PROPERTY = "%\r\n", "%\r\n:,"  # what a workflow command must not hold as it is
_HEAD = ("verdict", "case", "arm", "metric", "change", "why")


@dataclass(frozen=True)
class GateAnswer:
    """What the gate says: a judgement, or why no unit was judged."""

    code: Exit
    head: str
    text: str = ""
    judgement: Judgement | None = None

    @staticmethod
    def of(judgement: Judgement) -> GateAnswer:
        """The answer that a judgement is."""
        return GateAnswer(judgement.code, headline(judgement), judgement=judgement)

    @property
    def findings(self) -> tuple[Unit, ...]:
        """What was judged."""
        return self.judgement.findings if self.judgement else ()

    @property
    def tally(self) -> str:
        """How many units got each verdict."""
        counts = Counter(f.verdict for f in self.findings)
        counted = ", ".join(f"{counts[v]} {v}" for v in ORDER if counts[v])
        reported = sum(f.verdict is UnitVerdict.REGRESSED and f.held for f in self.findings)
        return counted + (
            f" ({reported} of the regressions are allowed or only reported)" if reported else ""
        )

    @property
    def conditions(self) -> list[str]:
        """What it rests on."""
        return _conditions(self.judgement) if self.judgement else []

    @property
    def loud(self) -> list[str]:
        """Notes that must not be overlooked."""
        return [note for note in (self.judgement.notes if self.judgement else ()) if isinstance(note, Loud)]

    @property
    def tone(self) -> printer.Tone:
        """Good for an OK of what was judged, whose head counts what was not decided; bad where something is wrong."""
        if self.code in (Exit.REGRESSED, Exit.NUMERICS, Exit.INVALID):
            return "bad"
        is_judged = self.judgement and not self.judgement.could_not_judge
        return "good" if self.code is Exit.OK and is_judged else ""

    def lines(self) -> list[str]:
        """The answer, then what it rests on."""
        return [f"Gate: {self.head}", self.text or self.tally, *self.conditions]

    def tables(self) -> list[printer.Table]:
        """One: what matters."""
        return [_table(self)] if self.judgement else []

    def data(self) -> dict[str, Any]:
        """Everything, for a program."""
        document: dict[str, Any] = {"format": FORMAT, "verdict": self.head, "exit_code": int(self.code)}
        if (j := self.judgement) is None:
            return document | {"reason": self.text}
        return document | {
            "date": j.date.isoformat(),
            "mode": j.mode,
            "session": j.baseline.session if j.mode == "paired" else "",
            "alone": j.candidate.alone,
            **{
                name: {"name": side.name, "commit": side.env.get("git_commit"), "env_id": side.env_id}
                for name, side in (("baseline", j.baseline), ("candidate", j.candidate))
            },
            "control": printer.picked(j.control, "moved reason change low high rounds"),
            "counts": {str(v): j.counted[v] for v in ORDER},
            "notes": list(j.notes),
            "findings": [_finding(f) for f in j.findings],
        }


def headline(judgement: Judgement) -> str:
    """The whole answer in a few words; OK only of what was judged."""
    slower = sum(f.told_only and f.verdict is UnitVerdict.REGRESSED for f in judgement.findings)
    if judgement.could_not_judge and judgement.code in (Exit.OK, Exit.INCONCLUSIVE):
        return _open(judgement)
    if judgement.mode == "broken" and judgement.code is Exit.REGRESSED:
        return "BROKEN"  # nothing is slower: it does not run
    if judgement.code is not Exit.OK:
        return HEADLINE[judgement.code]
    words = ["OK"] if judgement.times else ["OK", "no time judged"]
    undecided = judgement.counted[UnitVerdict.INCONCLUSIVE]
    words += [f"{count} {what}" for count, what in ((slower, "slower"), (undecided, "undecided")) if count]
    return ", ".join(words)


def _open(judgement: Judgement) -> str:
    """How much was not decided, and what of it looks slower."""
    times = judgement.times or judgement.findings
    count = sum(f.verdict is UnitVerdict.INCONCLUSIVE for f in times)
    words = f"COULD NOT JUDGE {count} of {len(times)}"
    if suspects := judgement.suspects:
        one = len(suspects) == 1
        how = (
            ("is" if one else "are") + " in doubt" if suspects[0].in_doubt else "look" + "s" * one + " slower"
        )
        words += f", {len(suspects)} of them {how}: "
        words += " ".join(filter(None, _row(suspects[0])[1:5]))
        words += f" and {len(suspects) - 1} more" if len(suspects) > 1 else ""
    return words


def terminal(answer: GateAnswer) -> str:
    """A table of what matters first, then what it rests on; the last line is the verdict."""
    last = f"{answer.head} (exit {int(answer.code)}): {answer.text or answer.tally}"
    shown: Any = SimpleNamespace(
        lines=lambda: [*answer.conditions, last], tables=answer.tables, tone=answer.tone
    )
    return printer.as_text(shown, tables_first=True)


def markdown(answer: GateAnswer) -> str:
    """The answer as markdown, for a pull request."""
    return printer.as_markdown(answer, level=3)


def comment(answer: GateAnswer) -> str:
    """The body of a comment on a pull request, with the table folded in; its first line finds the one that it replaces."""
    head, _, rest = markdown(answer).partition("\n")
    if len(rest) > MOST_COMMENT:
        rest = rest[:MOST_COMMENT].rpartition("\n")[0] + "\n\nThe rest is in the job's summary.\n"
    if answer.judgement:
        loud = "".join(f"> **{text.markdown(note)}**\n" for note in answer.loud)
        rest = f"\n{loud}\n<details><summary>Verdicts</summary>\n{rest}\n</details>\n"
    return f"<!-- harness gate -->\n{head}\n{rest}"


def _cases(answer: GateAnswer) -> list[printer.JUnitCase]:
    """One test a unit, and one for the whole. What does not count, a regression that is allowed or only reported, is skipped as what is
    open.
    """
    tests = []
    for f in answer.findings:
        is_open = f.verdict in (UnitVerdict.REGRESSED, UnitVerdict.INCONCLUSIVE)
        outcome = "failure" if f.counts else "skipped" if is_open else ""
        group, message = f"{f.key.suite}.{f.case}", f"{f.verdict}: {f.reason}"
        tests.append(printer.JUnitCase(group, _name(f), outcome, message, str(f.verdict)))
    failed = answer.code in (Exit.REGRESSED, Exit.NUMERICS)
    whole = "failure" if failed else "error" if answer.code else "system-out"
    message = ": ".join(filter(None, (answer.head, answer.text)))
    return [*tests, printer.JUnitCase("gate", "verdict", whole, message, answer.code.name)]


def junit(answer: GateAnswer) -> str:
    """JUnit XML."""
    return printer.junit("gate", _cases(answer))


def github_lines(answer: GateAnswer) -> str:
    """Workflow commands of GitHub: an error for what fails the gate, a warning for a note that is not to be overlooked."""
    *tests, whole = _cases(answer)
    worst, lines = [case for case in tests if case.outcome == "failure"], []
    for case in worst[: MOST_ANNOTATIONS - 1]:
        file = _FILE.findall(case.group.partition(".")[2])  # of a test; of other units no file is known
        lines.append(
            _command("error", f"Gate: {case.kind}", f"{case.group}: {case.name}: {case.message}", *file[:1])
        )
    if more := len(worst) - len(lines):
        lines.append(_command("error", "Gate", f"{more} more regressions"))
    elif answer.code and not worst:
        lines.append(_command("error", f"Gate: exit {int(answer.code)}", whole.message))
    lines += [_command("warning", "Gate", note) for note in answer.loud]
    return "".join(f"{line}\n" for line in lines)


def _name(f: Unit) -> str:
    """A unit within its case."""
    key = f.key
    return " ".join(filter(None, (key.arm, key.metric, key.regime, key.part)))


def _command(kind: str, title: str, message: str, file: str = "") -> str:
    named = f"file={_escaped(file, PROPERTY)}," if file else ""
    return f"::{kind} {named}title={_escaped(title, PROPERTY)}::{_escaped(message, DATA)}"


def as_json(answer: GateAnswer) -> str:
    """JSON of the answer's data; infinities and NaN are the strings "inf" and "nan"."""
    return json.dumps(json.loads(to_json(answer.data())), indent=1) + "\n"


def _finding(f: Unit) -> dict[str, Any]:
    timed = f.is_sound_time
    policy = (
        f"policy of the gate: changes up to {f.limit:.1%} are tolerated (tolerance and, of stored runs, the spread "
        "between sessions), beyond that a t test over the rounds decides"
    )
    return {
        **f.fields,
        "case_id": f.key.case_id,
        "rule": f.rule.rule,
        "verdict": str(f.verdict),
        **printer.picked(f, "reason change low high limit rounds flagged counts unit before after"),
        "direction": f.decision.effect.direction if timed else "",
        "noise_floor": f.decision.effect.floor,
        "policy": policy if timed else "",
        "p": f.decision.p,
        "p_confirm": f.decision.p_confirm,
        "more_rounds": f.decision.more,
        "cause": f.cause and printer.picked(f.cause, "name evidence"),
        "allowed_until": f.allowed and f.allowed.until.isoformat(),
    }


def _table(answer: GateAnswer) -> printer.Table:
    """All that is not OK, then the timed ones, the largest change first.

    What an arm lost because it was not measured, or is wrong, is one row and not one a metric.
    """

    def rank(f: Unit) -> tuple[int, float]:
        return ORDER.index(f.verdict), math.inf if math.isnan(f.change) else -f.change

    ranked = sorted(answer.findings, key=rank)
    first = [f for f in ranked if f.verdict is not UnitVerdict.OK or f.rule.rule == "timed"]
    groups: dict[object, list[Unit]] = {}
    for f in first[:SHOWN]:
        groups.setdefault(_row(f)[:3] if f.trouble else id(f), []).append(f)
    rows = []
    for group in groups.values():
        # A check's own line says what is wrong; those of its figures begin with the figure.
        checks = [f for f in group if f.state is UnitState.WRONG and f.rule.rule == "timed"]
        row = _row(group[0])
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        rows.append((*row[:3], row[3] + more, row[4], _row((checks or group)[0])[5]))
    hidden = [*first[SHOWN:], *(f for f in ranked if f not in first)]
    bad = sum(f.verdict is not UnitVerdict.OK for f in hidden)
    what = f", {bad} of them not OK" if bad else " that are OK"
    caption = f"Not shown: {len(hidden)} more{what} (--json FILE holds them)" if hidden else ""
    return printer.table(caption, _HEAD, rows)


def _row(f: Unit) -> tuple[str, ...]:
    """The cells of a finding."""
    key, word = f.key, str(f.verdict)
    if f.verdict is UnitVerdict.REGRESSED and f.held:
        word += ", only reported" if f.told_only else ", allowed"
    change = "" if math.isnan(f.change) else f"{f.change - 1:+.1%}"
    if change and f.rounds > 1:
        change += f" ({f.low - 1:+.1%} to {f.high - 1:+.1%})"
    why = [f.reason]
    if f.cause is not None:
        why.append(f"cause: {f.cause.name}" + (f" ({f.cause.evidence})" if f.cause.evidence else ""))
    if f.allowed is not None:
        until = "the allowance ended on" if f.expired else "allowed until"
        why.append(f"{until} {f.allowed.until}: {f.allowed.reason}")
    case = " ".join(filter(None, (key.suite, f.case, key.part)))
    metric = f"{key.metric} {f.unit}" if key.regime == RATIO else key.metric
    return word, case, key.arm, metric, change, "; ".join(why)


def _conditions(j: Judgement) -> list[str]:
    env = j.candidate.env
    device = env.get("gpu") or env.get("cpu") or env.get("device") or "unknown device"
    power = f" at {env['power_limit_w']:g} W" if env.get("power_limit_w") else ""
    has_torch = env.get("torch") or not env.get("python")
    software = f"torch {env.get('torch')}" if has_torch else f"Python {env['python']}"
    lines = [
        f"baseline {j.baseline.commit}, candidate {j.candidate.commit}: {MODES['alone' if j.candidate.alone and j.mode == 'paired' else j.mode]}",
        f"{device}{power}, {software}, {j.date.isoformat()}" if env else j.date.isoformat(),
    ]
    if j.mode != "machine-free":
        lines.append(j.control.reason)
    elif j.baseline.env_id != j.candidate.env_id:
        lines.append(f"the environments differ: {differing_fields(j.baseline.env, j.candidate.env)}")
    return lines + sorted(j.notes, key=lambda note: isinstance(note, Loud))  # nearest to the verdict


def _escaped(text: str, characters: Sequence[str]) -> str:
    """A value of a workflow command."""
    return "".join(f"%{ord(c):02X}" if c in characters else c for c in text)


OUTPUTS = ("json", "markdown", "junit", "comment")


def clear_outputs(options: Options) -> None:
    """Empties what an earlier gate left where this one is to write.

    Raises:
        UsageError: an output is one of the inputs, which are never touched, or can't be written.
    """
    paths = [path for name in OUTPUTS if (path := getattr(options, name)) is not None]
    inputs = list(_inputs(options))
    for path in paths:
        place = path.resolve()
        if any(place == one or _is_stored(place, one) for one in inputs):
            raise UsageError(f"{path} is an input of this gate; name another file")
    wrong = []
    for path in paths:
        try:
            path.write_text("")
        except OSError as error:
            wrong.append(f"cannot write {path} ({error.strerror})")
    if wrong:
        raise UsageError(wrong[0])


def _inputs(options: Options) -> Iterator[Path]:
    """Every file and folder that the gate is to read."""
    if options.policy is not None:
        yield options.policy.resolve()
    for name in (*(options.baseline or ()), *(options.candidate or ())):
        try:
            yield find_run(name, options.results_dir).resolve()
        except UsageError:  # it is refused where it is read
            continue


def _is_stored(place: Path, run: Path) -> bool:
    """Whether a file is part of a stored run, and not just a file beside its parts."""
    return place.is_relative_to(run) and (place.suffix == ".parquet" or place.name == run_files.ABOUT)


def write_answer(answer: GateAnswer, options: Options) -> None:
    """Writes the answer in every form that was asked for; the caller prints a refusal.

    Raises:
        UsageError: a file of a judgement can't be written.
    """
    judged = answer.judgement is not None
    if options.annotations:
        sys.stdout.write(github_lines(answer))
    if judged or not answer.code:
        sys.stdout.write(terminal(answer))
        sys.stdout.flush()
    for path, form in (
        (os.environ.get("GITHUB_STEP_SUMMARY"), markdown),
        (options.json, as_json),
        (options.markdown, markdown),
        (options.junit, junit),
        (options.comment, comment),
    ):
        summary = isinstance(path, str)  # of a GitHub job: appended to
        try:
            if path:
                with Path(path).open("a" if summary else "w", encoding="utf-8") as file:
                    file.write(form(answer) + "\n" * summary)
        except OSError as error:
            failure = f"cannot write {path} ({error.strerror})"
            if judged and not summary:  # no verdict is worth less because a page could not show it
                raise UsageError(f"{failure}; the verdict is printed above") from error
            sys.stderr.write(f"warning: {failure}\n")
