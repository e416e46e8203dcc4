"""Lead: the verdict on a machine in a sentence or two, each clause from the answers and the arms that they rest on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.report.doubts import NO_LOSS, checks, doubts, throttled, unjudged
from harness.report.headline import standings
from harness.report.training import unshown
from harness.report.verdicts import WHAT, deciding, what_of
from harness.store import text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.report.answer import Answer, Verdict
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

    Beside an arm's speed stands what holds of that arm alone; answers over all arms stand with what they count.

    Args:
        machine: whose rows they are.
        answers: of the machine, the one about speed first.
    """
    speed, *others = answers
    refuted = [a for a in others if a.verdict == "no"]
    open_ = [a for a in others if a.verdict in ("partly", "can't tell")]
    found = _deciding(machine)
    named: Standing | None = None
    sentences = []
    if refuted:
        verdict = f"Do not switch FP8 on from these runs: {_lower(refuted[0].brief)}"
        sentences += [_stated(a) for a in refuted[1:]]
        if found:
            named = found[0]
            sentences.append(f"Times alone: {_words(machine, named)}.")
    elif not machine.is_gpu:
        verdict = f"A CPU says nothing about speed. {_stated(others[0])}"
        others = others[1:]
    else:
        verdict, named = _speed(machine, speed, found)
    said = others if named is None and not refuted else open_
    sentences += [_stated(a) for a in said]
    if named is not None:
        sentences += _claims(machine, named)
    if any(run.state == "running" for run in machine.runs):
        verdict = f"So far: {_lower(verdict)}"
    return Lead(verdict, " ".join([*sentences, *_exceptions(machine)]))


# An answer over all arms of a page, as a statement
_STATED: Mapping[str, Mapping[Verdict, str]] = {
    "Is it numerically sound?": {
        "yes": "Numerically sound",
        "partly": "Numerically sound in part",
        "no": "Not numerically sound",
        "can't tell": "Not settled whether it is numerically sound",
    },
    "Did FP8 really run?": {
        "yes": "FP8 really ran",
        "partly": "FP8 is proved to have run in part",
        "no": "FP8 did not run as asked",
        "can't tell": "Not settled whether FP8 really ran",
    },
    "Does it train the same?": {
        "yes": "It trains the same",
        "partly": "It trains the same in part",
        "no": "It does not train the same",
        "can't tell": "Not settled whether it trains the same",
    },
}
_SPEED = {
    "yes": "FP8 is faster here",
    "partly": "FP8 is faster here in part",
    "no": "FP8 is not faster here",
    "can't tell": "Can't tell whether FP8 is faster here",
}


def _deciding(machine: Machine) -> list[Standing]:
    """Arms that the answer about speed rests on, by gain: those of one suite and mode."""
    part = deciding(machine) if machine.is_gpu else None
    if part is None:
        return []
    suite, arms = part[0], set(part[2]["arm"])
    return [s for s in standings(machine) if s.pairs and s.suite == suite and s.arm in arms]


def _speed(machine: Machine, answer: Answer, found: Sequence[Standing]) -> tuple[str, Standing | None]:
    """The verdict on speed with the best arm that nothing stands against; a gain in doubt is called no gain."""
    if not found:
        return f"{_SPEED[answer.verdict]}: {_lower(answer.brief)}", None
    clean = [s for s in found if not doubts(machine, s)]
    if answer.verdict in ("yes", "partly") and not any(
        p["verdict"] == "faster" for s in clean for p in s.pairs
    ):
        why = ", ".join(doubts(machine, found[0])) or "it is no gain beyond the noise"
        return f"Not shown that FP8 pays here: {_words(machine, found[0])}, but {why}.", found[0]
    best = (clean or found)[0]
    return f"{_SPEED[answer.verdict]}: {_words(machine, best)}.", best


def _words(machine: Machine, best: Standing) -> str:
    what = what_of(best.suite)
    values = [p["speedup"] for p in best.pairs]
    if len(values) > 1:
        within = f"{text.number(min(values))} to {text.number(max(values))} over {text.plural(len(values), 'case')}"
    else:
        within = text.interval(best.pairs[0]["low"], best.pairs[0]["high"])
    within = ", ".join(filter(None, (within, throttled(machine, best))))
    against = " and ".join(dict.fromkeys(p["baseline"] for p in best.pairs))
    return f"{best.arm} runs {what} at {text.ratio(best.gain)} the speed of {against} ({within})"


def _claims(machine: Machine, named: Standing) -> list[str]:
    """What was judged and passed of the arm that is named, and that its loss was not judged where nobody's was."""
    seen = checks(machine, named)
    held = [
        *(["its recipe passed its checks"] if not seen.results else []),
        *(["its GEMMs ran in FP8"] if not seen.gemms else []),
        *(["its recipe trains the same"] if not seen.loss and not unshown(machine) else []),
    ]
    told = [_sentence(held)] if held else []
    if seen.loss == NO_LOSS and NO_LOSS not in doubts(machine, named):
        told.append("Whether it trains the same was not judged.")
    return told


def _exceptions(machine: Machine) -> list[str]:
    """Arms in doubt and arms without a figure, by name; of arms that share their doubts the first ones."""
    if not machine.is_gpu:
        return []
    out = []
    found = [s for s in standings(machine) if s.pairs]
    alike: dict[tuple[str, ...], list[str]] = {}
    for s in found:
        if why := doubts(machine, s):
            alike.setdefault(tuple(why), []).append(s.arm)
    if alike:
        most_first = sorted(alike.items(), key=lambda group: -len(group[0]))
        groups = [f"{_few(arms)} ({', '.join(why)})" for why, arms in most_first]
        out.append(f"In doubt: {text.some(groups, MOST_NAMED)}.")
    own = found[0].suite if found else ""
    ranked = list(WHAT)
    asked = [*ranked[: ranked.index(own)], own] if own in ranked else [*ranked, own]
    absent = [
        f"{u.arm} ({u.word if suite == own else f'{what_of(suite)}: {u.word}'})"
        for suite in asked
        for u in unjudged(machine, suite)
    ]
    if absent:
        out.append(f"Not judged: {text.some(absent, MOST_NAMED)}.")
    return out


def _few(arms: Sequence[str]) -> str:
    more = len(arms) - MOST_NAMED
    return ", ".join(arms[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _stated(answer: Answer) -> str:
    return f"{_STATED[answer.question][answer.verdict]}: {_lower(answer.brief)}"


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
