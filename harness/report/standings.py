"""Standings: the FP8 arms of a machine by gain, and what stands against the figure of each."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.judge.reproduced import Found
from harness.judge.verdict.rows import is_candidate
from harness.report.records import first_steps, fp8_by_arm, gemms, numerics_by_arm, unchecked
from harness.report.runs import once
from harness.report.table import known
from harness.report.verdicts import by_arm, counted, deciding, faults, fp8_pairs, rank
from harness.store import text
from harness.store.case import Arm, arm_of, parse
from harness.store.compare import BOTH_SIDES, DISTURBED
from harness.store.printer import Cell
from harness.store.rows import grouped

if TYPE_CHECKING:
    from harness.report.runs import Machine
    from harness.report.table import Row

NO_LOSS, UNCHECKED = "no loss judged", "results not checked"


@dataclass(frozen=True, slots=True)
class Standing:
    """One arm with its gain and pairs in the suite that decides; on a CPU a recipe without any."""

    fields: Arm
    suite: str = ""
    pairs: list[dict[str, Any]] = field(default_factory=list)
    gain: float = float("nan")

    @property
    def arm(self) -> str:
        """Name of the arm."""
        return str(self.fields)

    @property
    def computes(self) -> Arm:
        """Recipe of the arm."""
        return self.fields.computes

    @property
    def shown(self) -> Cell:
        """Gain of the arm, with the interval of one case or the range over several, and the clocks of both sides."""
        values, verdicts = [p["speedup"] for p in self.pairs], {p["verdict"] for p in self.pairs}
        pair, several = self.pairs[0], len(values) > 1
        spread = text.spread(min(values), max(values), *counted(self.pairs)) if several else ""
        runs = max(p.get("runs", 1) for p in self.pairs)
        newest = f"newest of {runs} runs" * (runs > 1)
        return Cell(
            text.ratio(self.gain),
            self.gain,
            verdicts.pop() if len(verdicts) == 1 else "",
            ", ".join(filter(None, (spread, newest, under(BOTH_SIDES, self.pairs), _clocks(self.pairs)))),
            text.interval(pair["low"], pair["high"]) if not several and known(pair["low"]) else "",
        )

    @property
    def qualified(self) -> Cell:
        """The cell `shown` with every condition under which it decides nothing."""
        disturbed = (under(condition, self.pairs) for condition in DISTURBED)
        return self.shown._replace(note=", ".join(filter(None, (self.shown.note, *disturbed))))


def recipe(arm: Arm) -> Arm:
    """What an arm computes, however it is run: the recipe and whose it is; an empty arm where it is of no recipe.

    >>> str(recipe(parse("tensorwise_fused_eager"))), str(recipe(parse("torchao_rowwise_eager")))
    ('tensorwise', 'torchao_rowwise')
    """
    return arm.computes if arm.recipe or arm.peer else Arm()


@once
def standings(machine: Machine) -> list[Standing]:
    """Arms of the deciding suite by gain; where no speed counts, one for each recipe."""
    pairs = [p for p in fp8_pairs(machine) if known(p["speedup"]) and p["regime"] != "sustained"]
    if machine.is_gpu and pairs:
        suite = min((p["suite"] for p in pairs), key=rank)
        found = by_arm(p for p in pairs if p["suite"] == suite)
        every = [Standing(arm_of(own[0]), suite, own, gain) for _, gain, own in found]
        return sorted(every, key=lambda s: (-s.gain, s.arm))
    arms = [recipe(w.fields) for w in numerics_by_arm(machine) if w.fp8 and w.sqnr]
    arms += [v.fields.computes for v in machine.verdicts if is_candidate(v.fields)]
    return [Standing(what) for what in dict.fromkeys(arms) if what != Arm()]


def timed(machine: Machine) -> list[Standing]:
    """Standings that have a gain."""
    return [s for s in standings(machine) if s.pairs]


def in_question(machine: Machine) -> list[Standing]:
    """Arms that the answer about speed rests on: those of one suite and mode."""
    part = deciding(machine) if machine.is_gpu else None
    arms = {(part.suite, p["arm"]) for p in part.pairs} if part else ()
    return [s for s in timed(machine) if (s.suite, s.arm) in arms]


def unjudged(machine: Machine, suite: str) -> dict[str, str]:
    """FP8 arms of a suite that were asked for and have no ratio in any case: failed, skipped or missing."""
    own = [p for p in machine.pairs if p["suite"] == suite and p["regime"] != "sustained"]
    formed = {r["arm"] for r in own if known(r["speedup"])}
    asked = (r for r in reversed(own) if is_candidate(arm_of(r)) and (arm_of(r).has_fp8 or arm_of(r).peer))
    return {
        r["arm"]: r["status"] if r["status"] in ("failed", "skipped") else "missing"
        for r in asked
        if r["arm"] not in formed
    }


@dataclass(frozen=True, slots=True)
class Checks:
    """What stands against the results, the GEMMs and the loss of an arm, each in a few words; "" what was judged and passed."""

    results: str  # of its recipe
    gemms: str  # of the arm itself, in its suite
    loss: str  # of its recipe
    warnings: int = 0  # of fp8core.verify about first steps of its recipe, each once


def checks(machine: Machine, standing: Standing) -> Checks:
    """What was found of an arm: of its recipe where it has one, since that is what is computed, else of the arm."""
    steps = (s for s in first_steps(machine) if _same(standing, parse(s.arm)))
    warnings = len({warning for step in steps for warning in step.warnings})
    return Checks(_results(machine, standing), _gemms(machine, standing), _loss(machine, standing), warnings)


@once
def pairs_by_arm(machine: Machine) -> dict[tuple[str, str], list[Row]]:
    """`fp8_pairs` of each suite and arm."""
    return grouped(((p["suite"], p["arm"]), p) for p in fp8_pairs(machine))


@once
def doubts(machine: Machine, arm: str) -> list[str]:
    """What stands against the figure of an arm of `standings`: each in a few words; none where all was judged and passed."""
    (standing,) = (s for s in standings(machine) if s.arm == arm)
    theirs = machine.reproductions.get(arm)
    return [
        *(words for condition in DISTURBED if (words := under(condition, standing.pairs))),
        *reservations(machine, standing),
        *([theirs.words] if theirs and theirs.found == Found.NOT_REPRODUCED else []),
    ]


def reservations(machine: Machine, standing: Standing) -> list[str]:
    """Doubts that stand neither beside the figure nor beside the arm's name.

    A loss that was not judged counts only where another recipe's was.
    """
    pairs = standing.pairs
    own = pairs_by_arm(machine).get((standing.suite, standing.arm), [])
    not_slower = {p["case_id"] for p in pairs if p["verdict"] != "slower"}
    loaded = [p for p in own if p["regime"] == "sustained" and p["case_id"] in not_slower]
    missing = sum(p["verdict"] == "missing" and p["regime"] != "sustained" for p in own)
    unclear = sum(p["verdict"] == "unclear" and p["condition"] not in DISTURBED for p in pairs)
    seen, is_open = checks(machine, standing), any(is_candidate(v.fields) for v in machine.verdicts)
    found = [
        _among(unclear, pairs, "can't tell in "),
        f"{text.plural(missing, 'case')} without a time" if missing else "",
        _among(sum(p["verdict"] == "slower" for p in loaded), loaded, "slower under load in "),
        seen.results,
        seen.gemms,
        seen.loss if seen.loss != NO_LOSS or is_open else "",
    ]
    return [words for words in found if words]


def under(condition: str, pairs: list[dict[str, Any]]) -> str:
    """A condition with the number of cases that were measured under it; "" for none."""
    if len(pairs) == 1:
        return condition * (pairs[0]["condition"] == condition)
    return _among(sum(p["condition"] == condition for p in pairs), pairs, f"{condition} in ")


def _results(machine: Machine, standing: Standing) -> str:
    """Studies break recipes on purpose: they can refute, and prove nothing."""
    if wrong := [fault.what for fault in faults(machine) if _same(standing, fault.arm)]:
        return wrong[0]
    if standing.pairs:
        arm = standing.arm
        bare = {r["case_id"] for r in unchecked(machine, standing.suite) if r["arm"] == arm}
        among = _among(sum(p["case_id"] in bare for p in standing.pairs), standing.pairs, UNCHECKED + " in ")
        return UNCHECKED if len(bare) == len(standing.pairs) else among
    own = [w for w in numerics_by_arm(machine) if w.fp8 and w.proves and _same(standing, w.fields)]
    stepped = any(_same(standing, parse(s.arm)) for s in first_steps(machine))
    is_checked = stepped or any(w.passed for w in own)  # what one suite judged makes up for no other
    return "" if is_checked and not any(w.unjudged for w in own) else UNCHECKED


def _gemms(machine: Machine, standing: Standing) -> str:
    """Case by case: what one case ran too often makes up for no other."""
    rows = fp8_by_arm(machine)[standing.suite, standing.arm]
    every = [gemms(r) for r in rows]
    if short := [(ran.seen or 0, ran.due) for ran in every if ran.short]:
        seen, due = map(sum, zip(*short, strict=True))
        return _among(len(short), rows, f"only {seen} of {due} GEMMs in FP8 in ")
    uncounted = sum(ran.seen is None and not ran.direct for ran in every)
    return "FP8 not proved" if uncounted == len(every) else _among(uncounted, rows, "FP8 not proved in ")


def _loss(machine: Machine, standing: Standing) -> str:
    outcomes = Counter(v.verdict.outcome for v in machine.verdicts if v.fields == standing.computes)
    if not outcomes or outcomes["FAIL"]:
        return "loss: FAIL" if outcomes else NO_LOSS
    return "" if set(outcomes) == {"PASS"} else "loss: can't tell"


def _same(standing: Standing, arm: Arm) -> bool:
    """Whether a figure of an arm speaks for another one: arms without a recipe have nothing in common."""
    own = recipe(standing.fields)
    return arm == standing.fields if own == Arm() else recipe(arm) == own


def _among(part: int, whole: list[Any], words: str) -> str:
    """The words with the number of cases after them; "" for no case."""
    cases = text.plural(len(whole), "case")
    return f"{words}{cases if part == len(whole) else f'{part} of {cases}'}" if part else ""


def _clocks(pairs: list[dict[str, Any]]) -> str:
    """Both sides' clocks of the case in which they lie furthest apart; "" where none differ by over 1 %."""
    found = [
        (p["clock_mhz"], p["baseline_clock_mhz"])
        for p in pairs
        if p["clock_mhz"] > 0 < p["baseline_clock_mhz"]
    ]
    mine, theirs = max(found, key=lambda each: abs(math.log(each[0] / each[1])), default=(1.0, 1.0))
    return f"at {mine:,.0f} MHz against {theirs:,.0f}" if max(mine / theirs, theirs / mine) > 1.01 else ""
