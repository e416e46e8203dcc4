"""Render: an answer of the gate as a terminal table, JSON, markdown, JUnit XML, a comment and GitHub's annotations.

A form says of everything what the exit code says: what failed the gate is a failure, what was not decided is skipped
and never passed, and where there is no verdict the form says so, so that none of an earlier gate is taken for it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe

from harness.gate.decide import Verdict
from harness.gate.options import Exit, Loud
from harness.gate.sides import differing_fields
from harness.gate.unit import RATIO, State
from harness.store import text
from harness.store.measurement import to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.gate.unit import Finding, Judgement

FORMAT = 1  # of the JSON
ORDER = (Verdict.REGRESSED, Verdict.INCONCLUSIVE, Verdict.IMPROVED, Verdict.OK)
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
    "stored": "two stored runs, not measured together; the tolerance is widened by session_spread",
    "machine-free": "what no machine changes, and ratios within each run",
    "broken": "one side does not run, so nothing was measured",
}
_FILE = re.compile(r"([\w./-]+\.py)::")
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in no XML document
_HEAD = ("verdict", "case", "arm", "metric", "change", "why")


@dataclass(frozen=True)
class Answer:
    """What the gate says: a judgement, or why no unit was judged."""

    code: Exit
    head: str
    text: str = ""
    judgement: Judgement | None = None

    @staticmethod
    def of(judgement: Judgement) -> Answer:
        """The answer that a judgement is."""
        return Answer(judgement.code, headline(judgement), judgement=judgement)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was judged."""
        return self.judgement.findings if self.judgement else ()

    @property
    def tally(self) -> str:
        """How many units got each verdict."""
        counts = Counter(f.verdict for f in self.findings)
        counted = ", ".join(f"{counts[v]} {v}" for v in ORDER if counts[v])
        reported = sum(f.verdict is Verdict.REGRESSED and f.held for f in self.findings)
        return counted + (
            f" ({reported} of the regressions are allowed or only reported)" if reported else ""
        )


def headline(judgement: Judgement) -> str:
    """The whole answer in a few words; OK only of what was judged."""
    slower = sum(f.told_only and f.verdict is Verdict.REGRESSED for f in judgement.findings)
    if judgement.could_not_judge and judgement.code in (Exit.OK, Exit.INCONCLUSIVE):
        return _open(judgement)
    if judgement.mode == "broken" and judgement.code is Exit.REGRESSED:
        return "BROKEN"  # nothing is slower: it does not run
    if judgement.code is not Exit.OK:
        return HEADLINE[judgement.code]
    words = ["OK"] if judgement.times else ["OK", "no time judged"]
    undecided = judgement.counted[Verdict.INCONCLUSIVE]
    words += [f"{count} {what}" for count, what in ((slower, "slower"), (undecided, "undecided")) if count]
    return ", ".join(words)


def _open(judgement: Judgement) -> str:
    """How much was not decided, and what of it looks slower."""
    times = judgement.times or judgement.findings
    count = sum(f.verdict is Verdict.INCONCLUSIVE for f in times)
    words = f"COULD NOT JUDGE {count} of {len(times)}"
    if suspects := judgement.suspects:
        words += f", {len(suspects)} of them look{'s' * (len(suspects) == 1)} slower: "
        words += " ".join(filter(None, _row(suspects[0])[1:5]))
        words += f" and {len(suspects) - 1} more" if len(suspects) > 1 else ""
    return words


def terminal(answer: Answer) -> str:
    """A table of what matters first, then what it rests on; the last line is the verdict."""
    last = f"{answer.head} (exit {int(answer.code)}): {answer.text or answer.tally}"
    if answer.judgement is None:
        return last + "\n"
    rows, hidden = _table(answer)
    rows = [_HEAD, *(tuple(map(_flat, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
    if hidden:
        lines.append(f"... and {hidden} (--json FILE holds them)")
    return "\n".join([*lines, "", *map(_flat, [*_conditions(answer.judgement), last])]) + "\n"


def markdown(answer: Answer) -> str:
    """The same for a pull request."""
    lines = _conditions(answer.judgement) if answer.judgement else []
    return str(_forms().markdown(answer, *_table(answer), lines))


def comment(answer: Answer) -> str:
    """The body of a comment on a pull request, with the table folded in; its first line finds the one that it replaces."""
    head, _, rest = markdown(answer).partition("\n")
    if len(rest) > MOST_COMMENT:
        rest = rest[:MOST_COMMENT].rpartition("\n")[0] + "\n\nThe rest is in the job's summary.\n"
    return str(_forms().comment(answer, head, rest, list(_loud(answer))))


def junit(answer: Answer) -> str:
    """JUnit XML: one test a unit, and one for the whole."""
    cases = []
    for f in answer.findings:
        result = ""
        if f.verdict in (
            Verdict.REGRESSED,
            Verdict.INCONCLUSIVE,
        ):  # what does not count is reported, allowed, or open
            result = "failure" if f.counts else "skipped"
        where = f"{f.unit.key.suite}.{f.unit.case}"
        cases.append((where, _name(f), result, f"{f.verdict}: {f.reason}", str(f.verdict)))
    result = "failure" if answer.code in (Exit.REGRESSED, Exit.NUMERICS) else "error"
    text = f"{answer.head}: {answer.text}" if answer.text else answer.head
    cases.append(("gate", "verdict", result if answer.code else "system-out", text, answer.code.name))
    return str(_forms().junit(answer, cases, Counter(case[2] for case in cases)))


def github_lines(answer: Answer) -> str:
    """Workflow commands of GitHub: an error for what fails the gate, a warning for what is open, a line each."""
    worst = [f for f in answer.findings if f.counts]
    told = []
    for f in worst[: MOST_ANNOTATIONS - 1]:
        file = _FILE.search(
            f.unit.case
        )  # of a pytest-benchmark test; of other units no file is known to be at fault
        words = f"{f.unit.key.suite} {f.unit.case}: {_name(f)}: {f.reason}"
        told.append(("error", f"Gate: {f.verdict}", words, file[1] if file else ""))
    if len(worst) >= MOST_ANNOTATIONS:
        told.append(("error", "Gate", f"{len(worst) - MOST_ANNOTATIONS + 1} more regressions", ""))
    elif answer.code is not Exit.OK and not worst:
        title = f"exit {int(answer.code)}" if answer.judgement else answer.head
        told.append(("error", f"Gate: {title}", answer.text or answer.head, ""))
    told += [("warning", "Gate", note, "") for note in _loud(answer)]
    if answer.code is Exit.OK and (j := answer.judgement) and j.undecided:
        told.append(("warning", "Gate", f"{len(j.undecided)} of {len(j.times)} times are undecided", ""))
    return str(_forms().annotations(told))


def as_json(answer: Answer) -> str:
    """Everything, for a program; infinities and NaN are the strings "inf" and "nan"."""
    document: dict[str, Any] = {"format": FORMAT, "verdict": answer.head, "exit_code": int(answer.code)}
    if (j := answer.judgement) is None:
        document["reason"] = answer.text
    else:
        document |= {
            "date": j.date.isoformat(),
            "mode": j.mode,
            "session": j.baseline.session if j.mode == "paired" else "",
            **{
                name: {"name": side.name, "commit": side.env.get("git_commit"), "env_id": side.env_id}
                for name, side in (("baseline", j.baseline), ("candidate", j.candidate))
            },
            "control": {name: getattr(j.control, name) for name in j.control.__slots__},
            "counts": {str(v): j.counted[v] for v in ORDER},
            "notes": list(j.notes),
            "findings": [_finding(f) for f in j.findings],
        }
    return json.dumps(json.loads(to_json(document)), indent=1) + "\n"


def _finding(f: Finding) -> dict[str, Any]:
    timed = f.unit.is_sound_time
    policy = (
        f"policy of the gate: changes up to {f.limit:.1%} are tolerated (tolerance and, of stored runs, the spread "
        "between sessions), beyond that a t test over the rounds decides"
    )
    return {
        **f.unit.fields,
        "case_id": f.unit.key.case_id,
        "rule": f.unit.rule.rule,
        "verdict": str(f.verdict),
        **{
            name: getattr(f, name)
            for name in ("reason", "change", "low", "high", "limit", "rounds", "flagged", "counts")
        },
        **{name: getattr(f.unit, name) for name in ("unit", "before", "after")},
        "direction": f.decision.effect.direction if timed else "",
        "noise_floor": f.decision.effect.floor,
        "policy": policy if timed else "",
        "p": f.decision.p,
        "p_confirm": f.decision.p_confirm,
        "more_rounds": f.decision.more,
        "cause": f.cause and f.cause._asdict(),
        "allowed_until": f.allowed and f.allowed.until.isoformat(),
    }


def _table(answer: Answer) -> tuple[list[tuple[str, ...]], str]:
    """Rows of a table, and how many findings are left out of it: all that is not OK, then the timed ones, the largest change first.

    What an arm lost because it was not measured, or is wrong, is one row and not one a metric.
    """

    def rank(f: Finding) -> tuple[int, float]:
        return ORDER.index(f.verdict), math.inf if math.isnan(f.change) else -f.change

    ranked = sorted(answer.findings, key=rank)
    first = [f for f in ranked if f.verdict is not Verdict.OK or f.unit.rule.rule == "timed"]
    last = [f for f in ranked if f not in first]
    groups: dict[object, list[Finding]] = {}
    for f in first[:SHOWN]:
        groups.setdefault(_row(f)[:3] if f.unit.trouble else id(f), []).append(f)
    rows = []
    for group in groups.values():
        # A check's own line says what is wrong; those of its figures begin with the figure.
        checks = [f for f in group if f.unit.state is State.WRONG and f.unit.rule.rule == "timed"]
        row = _row(group[0])
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        rows.append((*row[:3], row[3] + more, row[4], _row((checks or group)[0])[5]))
    hidden = [*first[SHOWN:], *last]
    bad = sum(f.verdict is not Verdict.OK for f in hidden)
    what = f", {bad} of them not OK" if bad else " that are OK"
    return rows, f"{len(hidden)} more{what}" if hidden else ""


def _row(f: Finding) -> tuple[str, ...]:
    """The cells of a finding."""
    key, word = f.unit.key, str(f.verdict)
    if f.verdict is Verdict.REGRESSED and f.held:
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
    case = " ".join(filter(None, (key.suite, f.unit.case, key.part)))
    metric = f"{key.metric} {f.unit.unit}" if key.regime == RATIO else key.metric
    return word, case, key.arm, metric, change, "; ".join(why)


def _name(f: Finding) -> str:
    key = f.unit.key
    return " ".join(filter(None, (key.arm, key.metric, key.regime, key.part)))


def _conditions(j: Judgement) -> list[str]:
    env = j.candidate.env
    device = env.get("gpu") or env.get("cpu") or env.get("device") or "unknown device"
    power = f" at {env['power_limit_w']:g} W" if env.get("power_limit_w") else ""
    has_torch = env.get("torch") or not env.get("python")
    software = f"torch {env.get('torch')}" if has_torch else f"Python {env['python']}"
    lines = [
        f"baseline {j.baseline.commit}, candidate {j.candidate.commit}: {MODES[j.mode]}",
        f"{device}{power}, {software}, {j.date.isoformat()}" if env else j.date.isoformat(),
    ]
    if j.mode != "machine-free":
        lines.append(j.control.reason)
    elif j.baseline.env_id != j.candidate.env_id:
        lines.append(f"the environments differ: {differing_fields(j.baseline.env, j.candidate.env)}")
    return lines + sorted(j.notes, key=lambda note: isinstance(note, Loud))  # nearest to the verdict


def _loud(answer: Answer) -> Iterator[str]:
    return (note for note in (answer.judgement.notes if answer.judgement else ()) if isinstance(note, Loud))


@cache
def _forms() -> Any:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    env = jinja2.Environment(
        loader=loader, trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    env.filters |= {
        "cell": text.markdown,
        "xml": lambda text: markupsafe.escape(_UNPRINTABLE.sub("?", text)),
        "data": lambda text: _escaped(text, "%\r\n"),
        "property": lambda text: _escaped(text, "%\r\n:,"),
    }
    return env.get_template("forms.j2").module


def _flat(text: str) -> str:
    """In one line: what a row holds begins none of its own, which GitHub might take for a command."""
    return " ".join(text.split())


def _escaped(text: str, characters: Sequence[str]) -> str:
    """A value of a workflow command."""
    return "".join(f"%{ord(c):02X}" if c in characters else c for c in text)
