"""Lead: the verdict on a machine in a sentence or two, each clause from the answers and the arms that they rest on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.report.doubts import doubts, unjudged
from harness.report.headline import standings
from harness.report.verdicts import WHAT
from harness.store import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.answer import Answer
    from harness.report.headline import Standing
    from harness.report.runs import Machine

MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Lead:
    """The verdict in a sentence, and what a reader must know beside it."""

    verdict: str
    rest: str


def lead(machine: Machine, answers: Sequence[Answer]) -> Lead:
    """A "no" comes before any speed; what was not judged, failed or is in doubt is named.

    Args:
        machine: whose rows they are.
        answers: of the machine, the one about speed first.
    """
    speed, *others = answers
    refuted = [a for a in others if a.verdict == "no"]
    open_ = [a for a in others if a.verdict in ("partly", "can't tell")]
    found = [s for s in standings(machine) if s.pairs]
    sentences = []
    if refuted:
        verdict = f"Do not switch FP8 on from these runs: {_lower(refuted[0].brief)}"
        sentences += [_asked(a) for a in refuted[1:]]
        if found:
            sentences.append(f"Times alone: {_words(found[0])}.")
    elif not machine.is_gpu:
        verdict = f"A CPU says nothing about speed. {_asked(others[0])}"
        others = others[1:]
        open_ = [a for a in open_ if a in others]
    else:
        verdict = _speed(machine, speed, found)
    if open_:
        sentences.append("Not settled: " + " ".join(map(_asked, open_)))
    settled = [_DONE[a.question] for a in others if a.verdict == "yes" and a.question in _DONE]
    if settled:
        sentences.append(_sentence(settled))
    return Lead(verdict, " ".join([*sentences, *_exceptions(machine, found)]))


_DONE = {
    "Is it numerically sound?": "results passed their checks",
    "Did FP8 really run?": "FP8 really ran",
    "Does it train the same?": "it trains the same",
}
_SPEED = {
    "yes": "FP8 is faster here",
    "partly": "FP8 is faster here in part",
    "no": "FP8 is not faster here",
    "can't tell": "Can't tell whether FP8 is faster here",
}


def _speed(machine: Machine, answer: Answer, found: Sequence[Standing]) -> str:
    """The verdict on speed with the best arm that nothing stands against; a gain in doubt is called no gain."""
    if not found:
        return f"{_SPEED[answer.verdict]}: {_lower(answer.brief)}"
    clean = [s for s in found if not doubts(machine, s)]
    if answer.verdict in ("yes", "partly") and not any(
        p["verdict"] == "faster" for s in clean for p in s.pairs
    ):
        return (
            f"Not shown that FP8 pays here: {_words(found[0])}, but {', '.join(doubts(machine, found[0]))}."
        )
    return f"{_SPEED[answer.verdict]}: {_words((clean or found)[0])}."


def _words(best: Standing) -> str:
    what = WHAT.get(best.suite, f"suite {best.suite}").partition(" (")[0]
    values = [p["speedup"] for p in best.pairs]
    if len(values) > 1:
        within = f"{text.number(min(values))} to {text.number(max(values))} over {text.plural(len(values), 'case')}"
    else:
        within = text.interval(best.pairs[0]["low"], best.pairs[0]["high"])
    return f"{best.arm} runs {what} at {text.ratio(best.gain)} the speed of bf16 ({within})"


def _exceptions(machine: Machine, found: Sequence[Standing]) -> list[str]:
    """Arms in doubt and arms without a figure, by name."""
    out = []
    doubted = {s.arm: why for s in found if (why := doubts(machine, s))}
    if doubted:
        named = [f"{arm} ({', '.join(why)})" for arm, why in doubted.items()]
        out.append(f"In doubt: {text.some(named, MOST_NAMED)}.")
    if found:
        absent = [f"{u.arm} ({u.word})" for u in unjudged(machine, found[0].suite)]
        if absent:
            out.append(f"Not judged: {text.some(absent, MOST_NAMED)}.")
    return out


def _asked(answer: Answer) -> str:
    return f"{answer.question} {answer.verdict.capitalize()}: {_lower(answer.brief)}"


def _sentence(clauses: Sequence[str]) -> str:
    joined = _joined(clauses)
    return f"{joined[0].upper()}{joined[1:]}."


def _joined(clauses: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(clauses[:-1]), clauses[-1])))


def _lower(sentence: str) -> str:
    """A sentence as a clause: its first letter small, unless it begins a name such as FP8 or CPU."""
    return (
        sentence if sentence[:2].isupper() or sentence[1:2].isdigit() else sentence[:1].lower() + sentence[1:]
    )
