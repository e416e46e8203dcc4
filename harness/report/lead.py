"""Lead: the verdict on a machine in a sentence or two, each clause from the answers and the arms that they rest on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.report.standings import NO_LOSS, checks, doubts, in_question, throttled, timed, unjudged, unshown
from harness.report.verdicts import WHAT, rank, what_of
from harness.report.words import titled
from harness.store import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.runs import Machine
    from harness.report.standings import Standing
    from harness.report.verdicts import Answer

MOST_NAMED = 3


def lead(machine: Machine, answers: Sequence[Answer]) -> tuple[str, str]:
    """The verdict in a sentence, and what a reader must know beside it.

    A "no" comes before any speed; what was not judged, failed or is in doubt is named. Beside an arm's speed stands what
    holds of that arm alone; answers over all arms stand with what they count.

    Args:
        machine: whose rows they are.
        answers: of the machine, the one about speed first.
    """
    speed, *others = answers
    refuted = [a for a in others if a.verdict == "no"]
    found = in_question(machine)
    clean = [s for s in found if not doubts(machine, s.arm)]
    gained = any(p["verdict"] == "faster" for s in clean for p in s.pairs)
    # A gain in doubt is called no gain; else the best arm that nothing stands against is named.
    shown = gained or speed.verdict not in ("yes", "partly")
    best = found[:1] if refuted or not shown else (clean or found)[:1]
    named = best[0] if best else None
    seen = checks(machine, named) if named else None
    return titled(
        "lead",
        machine=machine,
        running=any(run.state == "running" for run in machine.runs),
        speed=speed,
        others=others,
        refuted=refuted,
        open=[a for a in others if a.verdict in ("partly", "can't tell")],
        shown=shown,
        words=_words(machine, named) if named else "",
        doubts=doubts(machine, named.arm) if named else [],
        seen=seen,
        unshown=unshown(machine),
        unjudged=seen and seen.loss == NO_LOSS and named and NO_LOSS not in doubts(machine, named.arm),
        in_doubt=_in_doubt(machine),
        absent=_absent(machine),
        lower=_lower,
    )


def _words(machine: Machine, best: Standing) -> str:
    values = [p["speedup"] for p in best.pairs]
    within = text.interval(best.pairs[0]["low"], best.pairs[0]["high"])
    if len(values) > 1:
        within = f"{text.number(min(values))} to {text.number(max(values))} over {text.plural(len(values), 'case')}"
    within = ", ".join(filter(None, (within, throttled(machine, best))))
    against = " and ".join(dict.fromkeys(p["baseline"] for p in best.pairs))
    return (
        f"{best.arm} runs {what_of(best.suite)} at {text.ratio(best.gain)} the speed of {against} ({within})"
    )


def _in_doubt(machine: Machine) -> str:
    """Arms in doubt by name; of arms that share their doubts the first ones."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for s in timed(machine):
        if why := doubts(machine, s.arm):
            alike.setdefault(tuple(why), []).append(s.arm)
    groups = sorted(alike.items(), key=lambda group: -len(group[0]))
    few = [text.some(arms, MOST_NAMED).replace("; ", ", ") for _, arms in groups]
    return text.some(
        [f"{arms} ({', '.join(why)})" for arms, (why, _) in zip(few, groups, strict=True)], MOST_NAMED
    )


def _absent(machine: Machine) -> str:
    """Arms without a figure by name, of the suite that decides and of those that would decide before it."""
    own = next((s.suite for s in timed(machine)), "")
    suites = [*list(WHAT)[: rank(own)[0]], own]
    named = [
        f"{u.arm} ({'' if suite == own else what_of(suite) + ': '}{u.word})"
        for suite in suites
        for u in unjudged(machine, suite)
    ]
    return text.some(named, MOST_NAMED) if machine.is_gpu else ""


def _lower(sentence: str) -> str:
    """A sentence as a clause: its first letter small, unless it begins a name such as FP8 or CPU."""
    is_name = sentence[:2].isupper() or sentence[1:2].isdigit()
    return sentence if is_name else sentence[:1].lower() + sentence[1:]
