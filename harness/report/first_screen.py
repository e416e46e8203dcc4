"""First screen: what a machine's rows say in a sentence, and what a reader must know beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from harness.judge.verdict.rows import unshown
from harness.report.standings import NO_LOSS, Checks, checks, doubts, in_question, timed, unjudged
from harness.report.verdicts import MOST_NAMED, WHAT, Answer, AnswerWord, answers, capital, rank, what_of
from harness.store import text
from harness.store.rows import grouped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.report.runs import Machine
    from harness.report.standings import Standing
    from harness.store.printer import Table, Tone

STATED = {  # yes, partly, no, can't tell; in the order in which they are printed
    "speed": (
        "FP8 is faster here",
        "FP8 is faster here in part",
        "FP8 is not faster here",
        "can't tell whether FP8 is faster here",
    ),
    "sound": (
        "numerically sound",
        "numerically sound in part",
        "not numerically sound",
        "not settled whether it is numerically sound",
    ),
    "same": (
        "it trains the same",
        "it trains the same in part",
        "it does not train the same",
        "not settled whether it trains the same",
    ),
    "ran": (
        "FP8 really ran",
        "FP8 is proved to have run in part",
        "FP8 did not run as asked",
        "not settled whether FP8 really ran",
    ),
}


@dataclass(frozen=True, slots=True)
class FirstScreen:
    """A result of the printer. A "no" comes before any speed; what was not judged, failed or is in doubt is named.

    Beside an arm's speed stands what holds of that arm alone; answers over all arms stand with what they count.

    Attributes:
        answers: over all arms, the one about speed first.
        on_cpu: times say nothing then.
        under_way: some run has not ended.
        unfinished: runs that are not known to have finished, those under way included.
        failed: figures that failed or are not whole, in any suite.
        findings: of the diagnosis.
        arm: the one that is named: the best that nothing stands against, of those that gain where any does, else the best;
            None where no speed counts.
        against: what stands against its figure, each in a few words.
        passed: what was found of it; "" is what was judged and passed.
        is_gain: its figure may be called a gain.
        fault_unseen: no arm with a known fault was seen to fail.
        doubted: arms by what stands against them.
        absent: arms without a figure, each with why.
    """

    answers: Sequence[Answer]
    on_cpu: bool = False
    under_way: bool = False
    unfinished: Sequence[str] = ()
    failed: int = 0
    findings: int = 0
    arm: Standing | None = None
    against: Sequence[str] = ()
    passed: Checks | None = None
    is_gain: bool = True
    fault_unseen: bool = False
    doubted: Mapping[str, Sequence[str]] | None = None
    absent: Sequence[str] = ()

    @classmethod
    def of(cls, machine: Machine) -> FirstScreen:
        """First screen of a machine."""
        found = in_question(machine)
        every = answers(machine)
        standing = timed(machine)
        clean = [s for s in found if not doubts(machine, s.arm)]
        gains = [s for s in clean if any(p["verdict"] == "faster" for p in s.pairs)]
        # A gain in doubt is called no gain; else the best arm that has one and that nothing stands against is named.
        is_gain = bool(gains) or every[0].verdict not in ("yes", "partly")
        refuted = any(a.verdict == "no" for a in every[1:])
        named = next(iter(found if refuted or not is_gain else gains or clean or found), None)
        own = standing[0].suite if standing else ""
        absent = [
            f"{arm} ({'' if suite == own else what_of(suite) + ': '}{word})"
            for suite in (*list(WHAT)[: rank(own)[0]], own)
            for arm, word in sorted(unjudged(machine, suite).items())
        ]
        return cls(
            every,
            not machine.is_gpu,
            any(run.state == "running" for run in machine.runs),
            [run.run_id for run in machine.runs if run.state_note],
            len(machine.pick(status=lambda status: status not in ("ok", "skipped"))),
            len(machine.findings),
            named,
            doubts(machine, named.arm) if named else (),
            checks(machine, named) if named else None,
            is_gain,
            bool(unshown(machine.verdicts)),
            grouped((", ".join(why), s.arm) for s in standing if (why := doubts(machine, s.arm))),
            absent if machine.is_gpu else (),
        )

    @property
    def refuted(self) -> list[Answer]:
        """What was found wrong of any arm."""
        return [a for a in self.answers[1:] if a.verdict == "no"]

    @property
    def tone(self) -> Tone:
        """Good where FP8 is faster and nothing is open, bad where something is wrong or nothing is faster."""
        if self.refuted or (self.arm and self.answers[0].verdict == "no"):
            return "bad"
        below = (
            self.against
            or self.doubted
            or self.absent
            or self.fault_unseen
            or self.passed != Checks("", "", "")
            or self.failed
            or self.findings
        )
        is_open = below or self.on_cpu or self.under_way or self.unfinished or not self.is_gain
        return "good" if self.arm and not is_open and {a.verdict for a in self.answers} == {"yes"} else ""

    def lines(self) -> list[str]:
        """The verdict, then what is open, what holds of the named arm, and the arms in doubt or without a figure."""
        speed, refuted = self.answers[0], self.refuted
        # What these runs measured comes first
        first, *others = sorted(
            self.answers[self.on_cpu :], key=lambda a: (not a.has_evidence, list(STATED).index(a.about))
        )
        words = _words(self.arm) if self.arm else ""
        against = ", ".join(self.against)
        if refuted:
            verdict = f"do not switch FP8 on from these runs: {refuted[0].clause}."
        elif self.on_cpu:
            verdict = f"a CPU says nothing about speed. {capital(_stated(first))}"
        elif not words:
            verdict = _stated(first)
        elif not self.is_gain:
            verdict = (
                f"not shown that FP8 pays here: {words}, but {against or 'it is no gain beyond the noise'}."
            )
        else:
            verdict = f"{_word(speed)}: {words}{', but ' * bool(against)}{against}."
        found = [
            f"so far: {verdict}" if self.under_way or self.unfinished else verdict,
            *map(_stated, refuted[1:]),
        ]
        found += [f"Times alone: {words}."] * bool(refuted and words)
        others = [first, *others] if refuted or words else others
        is_open = [a for a in others if a.about != "speed" and a.verdict in ("partly", "can't tell")]
        found += map(_stated, is_open if refuted or words else others)
        found += self._of_the_named()
        alike = sorted((self.doubted or {}).items(), key=lambda group: -group[0].count(", "))
        doubted = [f"{text.some(arms, MOST_NAMED, ', ')} ({why})" for why, arms in alike]
        below = {"failed figure": self.failed, "finding": self.findings}
        listed = {
            "Not finished": self.unfinished,
            "In doubt": doubted,
            "Not judged": self.absent,
            "Below": [text.plural(count, what) for what, count in below.items() if count],
        }
        found += [f"{what}: {text.some(arms, MOST_NAMED)}." for what, arms in listed.items() if arms]
        return [*map(capital, found)]

    def _of_the_named(self) -> list[str]:
        if not self.passed:
            return []
        warned = f" with {text.plural(self.passed.warnings, 'warning')} of fp8core.verify" * bool(
            self.passed.warnings
        )
        held = {
            f"its recipe passed its checks{warned}": not self.passed.results,
            "its GEMMs ran in FP8": not self.passed.gemms,
            "its recipe trains the same": not (self.passed.loss or self.fault_unseen),
        }
        good = text.some([words for words, holds in held.items() if holds])
        is_open = self.passed.loss == NO_LOSS and NO_LOSS not in self.against
        return [f"{good}."] * bool(good) + ["Whether it trains the same was not judged."] * is_open

    def tables(self) -> list[Table]:
        """None: the table of arms stands below."""
        return []

    def data(self) -> dict[str, Any]:
        """Plain values; `speedup` is the geometric mean over cases."""
        return {
            "answers": {a.about: {"verdict": a.verdict, "sentence": a.sentence} for a in self.answers},
            "arm": self.arm and self.arm.arm,
            "speedup": self.arm and self.arm.gain,
            "against": self.against,
            "in_doubt": {arm: why for why, arms in (self.doubted or {}).items() for arm in arms},
            "not_judged": self.absent,
            "under_way": self.under_way,
            "unfinished": self.unfinished,
            "failed": self.failed,
            "findings": self.findings,
        }


def _word(found: Answer) -> str:
    return STATED[found.about][get_args(AnswerWord).index(found.verdict)]


def _stated(found: Answer) -> str:
    return f"{_word(found)}: {found.clause}."


def _words(best: Standing) -> str:
    shown = best.shown
    within = ", ".join(filter(None, (shown.interval, shown.note))) or text.NONE
    against = " and ".join(dict.fromkeys(p["baseline"] for p in best.pairs))
    return f"{best.arm} runs {what_of(best.suite)} at {shown.text} the speed of {against} ({within})"
