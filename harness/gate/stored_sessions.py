"""Sittings: what stored sessions of the gate concluded, counted where the truth is known; no change, or a planted one."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness import store
from harness.gate.decide import Verdict, decide
from harness.gate.judge import judge
from harness.gate.matching import match
from harness.gate.sides import load_side
from harness.store import run_files, stats
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from harness.gate.judge import Judgement
    from harness.gate.judged_metric import Unit
    from harness.gate.policy import Policy

SHUFFLES = 20  # of the labels of each stored unit


@dataclass(frozen=True, slots=True)
class StoredSession:
    """What one stored session concluded."""

    name: str
    pad: float
    judgement: Judgement
    seconds: float  # measuring, both stages
    rounds: int  # of the first stage
    load: float  # load average of the machine at its end

    @property
    def regressed(self) -> bool:
        """Whether any unit was called REGRESSED."""
        return self.judgement.counted[str(Verdict.REGRESSED)] > 0


def read_sittings(folder: Path, policy: Policy) -> list[StoredSession]:
    """Judges every session below a folder.

    Raises:
        UsageError: there is none.
    """
    names = sorted(
        {p.parent.parent.parent for p in run_files.below(folder, run_files.ABOUT, "**/candidate/stage1")}
    )
    if not names:
        raise UsageError(f"no session in {folder}; one is <session>/baseline and <session>/candidate")
    sittings = []
    for name in names:
        about = [store.read_about(p) for p in sorted((name / "candidate").glob("stage*"))]
        judgement = judge(
            load_side(name / "baseline", "baseline", ""),
            load_side(name / "candidate", "candidate", ""),
            policy,
        )
        pad = float(about[0].get("gate", {}).get("pad", 0.0))
        seconds = sum(float(a.get("gate", {}).get("seconds", 0.0)) for a in about)
        first = about[0].get("gate", {})
        rounds, load = int(first.get("rounds", 0)), float(first.get("load_average") or math.nan)
        sittings.append(StoredSession(name.name, pad, judgement, seconds, rounds, load))
    return sittings


def sitting_lines(sittings: Sequence[StoredSession]) -> list[str]:
    """How many sittings of each slowdown called something REGRESSED, and how the units fared."""
    by_pad: dict[float, list[StoredSession]] = defaultdict(list)
    for sitting in sittings:
        by_pad[sitting.pad].append(sitting)
    env = sittings[0].judgement.candidate.env
    lines = [
        "",
        f"Measured on {env.get('gpu') or env.get('cpu')}, torch {env.get('torch')}: sittings, and the timed units in "
        "them; 95 % intervals by Clopper and Pearson.",
        "",
        "| slowdown put in | sittings | REGRESSED | 95 % interval | invalid | units REGRESSED | OK | IMPROVED | "
        "INCONCLUSIVE | seconds, median and most | rounds, median and fewest | load, median and most |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for pad, group in sorted(by_pad.items()):
        hits = sum(s.regressed for s in group)
        low, high = stats.clopper_pearson(hits, len(group))
        units = [f.verdict for s in group for f in s.judgement.findings if f.unit.rule.rule == "timed"]
        invalid = sum(s.judgement.control.moved for s in group)
        seconds = [s.seconds for s in group if s.seconds]
        took = f"{np.median(seconds):.0f}, {max(seconds):.0f}" if seconds else "not recorded"
        rounds, loads = [s.rounds for s in group], [s.load for s in group]
        took += f" | {np.median(rounds):.0f}, {min(rounds)} | {np.median(loads):.1f}, {max(loads):.1f}"
        counts = " | ".join(
            str(units.count(v))
            for v in (Verdict.REGRESSED, Verdict.OK, Verdict.IMPROVED, Verdict.INCONCLUSIVE)
        )
        name = "none (A/A)" if pad == 0 else f"{pad:.0%}"
        lines.append(
            f"| {name} | {len(group)} | {hits} | {low:.1%} to {high:.1%} | {invalid} | {counts} | {took} |"
        )
    return lines


def planted_lines(sittings: Sequence[StoredSession]) -> list[str]:
    """By unit: the slowdown that was measured where one was put in, in the medians and in the fastest calls."""
    ratios: dict[tuple[float, str], list[tuple[float, float]]] = defaultdict(list)
    for sitting in sittings:
        for f in sitting.judgement.findings if sitting.pad else ():
            if f.unit.rule.rule == "timed" and math.isfinite(f.change) and not f.unit.members:
                name = f"{f.unit.suite}, {f.unit.case}, {f.unit.arm}"
                ratios[sitting.pad, name].append((f.change, _ratio_of_fast(f.unit)))
    if not ratios:
        return []
    lines = [
        "",
        "Slowdowns as they were measured, by unit: median over the sittings, and range. The verdict uses the medians of "
        "the rounds; the ratio of the fastest tenth (10 % quantiles of the first stage's rounds) "
        "is shown for comparison, because interruptions hardly affect it.",
        "",
        "| put in | unit | ratio of the medians | range | ratio of the fastest tenth | range |",
        "|---|---|---|---|---|---|",
    ]
    for (pad, name), found in sorted(ratios.items()):
        cells = (f"{np.median(v):.3f} | {min(v):.3f} to {max(v):.3f}" for v in zip(*found, strict=True))
        lines.append(f"| {pad:.0%} | {name} | {' | '.join(cells)} |")
    return lines


def _ratio_of_fast(unit: Unit) -> float:
    """Candidate / baseline of the rounds' 10 % quantiles, geometric mean over the rounds of the first stage."""
    sides = []
    for rows in unit.rows:
        samples, rounds = (
            np.concatenate([getattr(row, name) for row in rows]) for name in ("samples", "rounds")
        )
        sides.append({r: np.quantile(samples[rounds == r], 0.1) for r in np.unique(rounds).tolist()})
    before, after = sides
    return float(np.exp(np.mean([np.log(after[r] / before[r]) for r in before.keys() & after.keys()])))


def shuffle_lines(sittings: Sequence[StoredSession], policy: Policy, seed: int = 0) -> list[str]:
    """Alarms on stored A/A rounds whose two sides are swapped at random."""
    random = np.random.default_rng(seed)
    rounds, limits = [], []
    for sitting in sittings:
        j = sitting.judgement
        for unit in match(j.baseline, j.candidate, j.mode, policy).units if sitting.pad == 0 else ():
            if unit.rule.rule == "timed" and unit.first.size:
                for _ in range(SHUFFLES):
                    rounds.append(unit.first * random.choice([-1.0, 1.0], unit.first.size))
                    limits.append(float(np.log1p(unit.rule.tolerance)))
    if not rounds:
        return []
    empty = [np.empty(0)] * len(rounds)
    flags = [decide(rounds, empty, bar, policy.alpha, one_run=False) for bar in (limits, [0.0] * len(limits))]
    shifted, plain = (sum(d.flagged for d in found) for found in flags)
    total = len(rounds)
    return [
        "",
        f"Shuffled labels: {total} relabelled units. Flagged by the first stage: {shifted} "
        f"({_interval(shifted, total)}) against the tolerance, {plain} ({_interval(plain, total)}) against zero, where "
        f"2 x {policy.alpha:g} is due as both directions are asked.",
    ]


def coverage_lines(sittings: Sequence[StoredSession]) -> list[str]:
    """How many intervals of A/A units hold the truth, which is a ratio of 1; the control's (99 %) apart."""
    equal = [s.judgement for s in sittings if s.pad == 0]
    units = [f for j in equal for f in j.findings if f.unit.rule.rule == "timed" and math.isfinite(f.change)]
    controls = [j.control for j in equal if math.isfinite(j.control.change)]
    if not units or not controls:
        return []
    held, calm = sum(f.low <= 1 <= f.high for f in units), sum(c.low <= 1 <= c.high for c in controls)
    return [
        "",
        f"Equal code: {held} of {len(units)} 95 % intervals hold 1 ({_interval(held, len(units))}), and {calm} of "
        f"{len(controls)} 99 % intervals of the control ({_interval(calm, len(controls))}).",
    ]


def stored_lines(sittings: Sequence[StoredSession], policy: Policy) -> list[str]:
    """The stored mode on equal code: the baseline of each A/A sitting against the candidate of every other one."""
    equal = [s.judgement for s in sittings if s.pad == 0]
    found = [judge(a.baseline, b.candidate, policy) for a, b in itertools.permutations(equal, 2)]
    if not found:
        return []
    regressed = sum(j.counted[str(Verdict.REGRESSED)] > 0 and not j.control.moved for j in found)
    moved = sum(j.control.moved for j in found)
    return [
        "",
        f"Stored mode, equal code: {len(found)} comparisons of {len(equal)} sittings with one another (so they are not "
        f"independent): {regressed} called something REGRESSED ({regressed / len(found):.1%}), {moved} were invalid as "
        "the control had moved.",
    ]


def _interval(hits: int, trials: int) -> str:
    low, high = stats.clopper_pearson(hits, trials)
    return f"{low:.2%} to {high:.2%}"


def about_sittings(sittings: Sequence[StoredSession], policy: Policy) -> list[str]:
    """Everything that stored sittings say about the gate."""
    return [
        *sitting_lines(sittings),
        *planted_lines(sittings),
        *coverage_lines(sittings),
        *shuffle_lines(sittings, policy),
        *stored_lines(sittings, policy),
    ]
