"""`python -m harness gate-selftest`: how often the gate is wrong, by simulation, on real cases and on stored history.

- simulation: the grid of `simulate`, held to the gate's bars. Exit 1 where one is missed.
- `--real N`: N sittings of this work tree against itself (A/A), and N for each slowdown of `--pads`, put into one side.
- `--sessions DIR`: counts what stored sessions concluded, whoever measured them, and shuffles their labels: a round's
  two sides are equal in an A/A session, so swapping them at random must not raise alarms either. A/A sessions are set
  against one another too, as two stored runs would be.

Every count comes with its Clopper-Pearson interval.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import stats, store
from harness.errors import UsageError
from harness.gate import SWEEP, Parser
from harness.gate.decide import Verdict, decide
from harness.gate.judge import judge
from harness.gate.policy import load_policy
from harness.gate.sides import load_side
from harness.gate.simulate import (
    BAR_ROUNDS,
    EFFECTS,
    NOISES,
    ROUNDS,
    TOLERANCE,
    bars,
    common_rules,
    grid,
)
from harness.gate.units import match

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from harness.gate.judge import Judgement
    from harness.gate.policy import Policy
    from harness.gate.simulate import Cell
    from harness.gate.unit import Unit

Tell = Callable[[str], None]
SHUFFLES = 20  # of the labels of each stored unit


@dataclass(frozen=True, slots=True)
class Sitting:
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


def main(argv: Sequence[str]) -> int:
    """Returns 0 where every bar of the simulation holds, else 1."""
    parser = Parser(prog="python -m harness gate-selftest", description="The gate's own error rates.")
    parser.add_argument("--trials", type=int, default=2000, help="of each cell of the grid (default 2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", type=Path, metavar="FILE")
    parser.add_argument(
        "--real", type=int, default=0, metavar="N", help="sittings on this machine, of each kind"
    )
    parser.add_argument(
        "--pads", default="0.02,0.05,0.10", help="slowdowns that are put in (default %(default)s)"
    )
    parser.add_argument("--pairs", type=int, help="rounds of a real sitting (policy: pairs)")
    parser.add_argument("--confirm-pairs", type=int, help="rounds of its confirmation")
    parser.add_argument(
        "--sessions", type=Path, nargs="+", metavar="DIR", help="stored sessions to be counted"
    )
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    parser.add_argument(
        "words", nargs="*", metavar="KEY=VALUE", help=f"what --real measures (default {SWEEP})"
    )
    options = parser.parse_intermixed_args(list(argv))
    if options.trials < 100:
        parser.error(f"--trials {options.trials}: fewer than 100 say nothing about rates of 1 %")
    policy = load_policy(options.policy)
    folders = list(options.sessions or [])
    if options.real:
        folders.append(_measure(options, policy))
    cells = grid(policy, options.trials, options.seed)
    sittings = [s for folder in folders for s in read_sittings(folder, policy)]
    text = "\n".join(
        [
            *simulation_lines(cells, options.trials, policy),
            *common_lines(options.trials, options.seed),
            *(_about_sittings(sittings, policy) if sittings else []),
        ]
    )
    target = options.results_dir / "gate-selftest" / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    _store(target, text, cells, sittings)
    sys.stdout.write(f"{text}\nstored   {target}\n")
    return 0 if all(bar.holds for bar in bars(cells)) else 1


def simulation_lines(cells: Sequence[Cell], trials: int, policy: Policy) -> list[str]:
    """The bars, and a table of REGRESSED / OK in percent for every noise, number of rounds and effect."""
    lines = [
        f"Simulated: {trials} trials a cell, tolerance {TOLERANCE:.0%}, alpha {policy.alpha:g}, confirmation by "
        f"{policy.confirm_pairs} fresh rounds at {policy.alpha_confirm:g}.",
        "",
        "| promise | worst cell | bar | holds |",
        "|---|---|---|---|",
    ]
    for bar in bars(cells):
        sign = "at least" if bar.at_least else "at most"
        lines.append(
            f"| {bar.text} | {bar.worst:.1%} ({bar.where}) | {sign} {bar.bound:.0%} | {'yes' if bar.holds else 'NO'} |"
        )
    lines += [
        "",
        "REGRESSED / OK in % of trials at a true slowdown of so many tolerances; the rest is INCONCLUSIVE.",
        "",
        "| noise | rounds | " + " | ".join(f"{e:g}" for e in EFFECTS) + " | coverage |",
        "|---|---|" + "---|" * (len(EFFECTS) + 1),
    ]
    table = {(c.noise, c.rounds, c.effect): c for c in cells}
    for noise, rounds in dict.fromkeys((c.noise, c.rounds) for c in cells):
        row = [table[noise, rounds, effect] for effect in EFFECTS]
        shares = [f"{100 * c.share(Verdict.REGRESSED):.1f} / {100 * c.share(Verdict.OK):.1f}" for c in row]
        lines.append(f"| {noise} | {rounds} | {' | '.join(shares)} | {row[0].covered / row[0].trials:.1%} |")
    return lines


def common_lines(trials: int, seed: int) -> list[str]:
    """How often the rules of other gates call unchanged code slower, under the same noise."""
    found = [(noise.name, common_rules(noise, trials, seed)) for noise in NOISES]
    return [
        "",
        f"Two common rules on the same noise, {BAR_ROUNDS} rounds, no change: alarms in % of {trials} trials.",
        "",
        f"| noise | one new run {TOLERANCE:.0%} above one saved run | rank test at 5 % on pooled samples |",
        "|---|---|---|",
        *(f"| {name} | {saved:.1%} | {ranks:.1%} |" for name, (saved, ranks) in found),
    ]


def read_sittings(folder: Path, policy: Policy) -> list[Sitting]:
    """Judges every session below a folder.

    Raises:
        UsageError: there is none.
    """
    names = sorted({p.parent.parent.parent for p in folder.rglob("candidate/stage1/run.json")})
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
        sittings.append(Sitting(name.name, pad, judgement, seconds, rounds, load))
    return sittings


def sitting_lines(sittings: Sequence[Sitting]) -> list[str]:
    """How many sittings of each slowdown called something REGRESSED, and how the units fared."""
    by_pad: dict[float, list[Sitting]] = defaultdict(list)
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


def planted_lines(sittings: Sequence[Sitting]) -> list[str]:
    """By unit: the slowdown that was measured where one was put in, in the medians and in the fastest calls."""
    ratios: dict[tuple[float, str], list[tuple[float, float]]] = defaultdict(list)
    for sitting in sittings:
        for f in sitting.judgement.findings if sitting.pad else ():
            if f.unit.rule.rule == "timed" and math.isfinite(f.change):
                name = f"{f.unit.suite}, {f.unit.case}, {f.unit.arm}"
                ratios[sitting.pad, name].append((f.change, _ratio_of_fast(f.unit)))
    if not ratios:
        return []
    lines = [
        "",
        "Slowdowns as they were measured, by unit: median over the sittings, and range. The verdict uses the medians of "
        "the rounds; beside them stands the ratio of the fastest tenth (10 % quantiles of the first stage's rounds), "
        "which hardly any interruption reaches.",
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
    before, after = (
        {r: np.quantile(np.asarray(row.samples)[np.asarray(row.rounds) == r], 0.1) for r in set(row.rounds)}
        for row in unit.rows
    )
    return float(np.exp(np.mean([np.log(after[r] / before[r]) for r in before.keys() & after.keys()])))


def shuffle_lines(sittings: Sequence[Sitting], policy: Policy, seed: int = 0) -> list[str]:
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


def coverage_lines(sittings: Sequence[Sitting]) -> list[str]:
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


def stored_lines(sittings: Sequence[Sitting], policy: Policy) -> list[str]:
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


def _about_sittings(sittings: Sequence[Sitting], policy: Policy) -> list[str]:
    return [
        *sitting_lines(sittings),
        *planted_lines(sittings),
        *coverage_lines(sittings),
        *shuffle_lines(sittings, policy),
        *stored_lines(sittings, policy),
    ]


def _measure(options: argparse.Namespace, policy: Policy) -> Path:
    """Real sittings of this work tree against itself; returns the folder that holds them."""
    from harness.gate.drive import Request, measure_and_judge

    given = {n: getattr(options, n) for n in ("pairs", "confirm_pairs")}
    policy = dataclasses.replace(policy, **{n: v for n, v in given.items() if v is not None})
    root = Path(__file__).resolve().parent.parent.parent
    try:
        pads = [0.0, *(float(p) for p in options.pads.split(",") if p)]
    except ValueError as error:
        raise UsageError(f"--pads {options.pads!r}: expected shares such as 0.02,0.10") from error
    folder: Path = (
        options.results_dir / "gate-selftest" / "sittings" / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    )
    for pad in pads:
        for index in range(options.real):
            load, started = os.getloadavg()[0], time.monotonic()
            request = Request(
                {"baseline": root, "candidate": root},
                options.words or [SWEEP],
                policy,
                folder,
                pads={"candidate": pad},
                seed=options.seed + index,
            )
            judgement = measure_and_judge(request, lambda line: None)
            sys.stderr.write(
                f"slowdown {pad:.0%}, sitting {index + 1} of {options.real}: {dict(judgement.counted)}, exit "
                f"{int(judgement.code)}, {time.monotonic() - started:.0f} s, load {load:.1f} to {os.getloadavg()[0]:.1f}\n"
            )
    return folder


def _store(target: Path, text: str, cells: Sequence[Cell], sittings: Sequence[Sitting]) -> None:
    document: dict[str, Any] = {
        "grid": {"noises": [dataclasses.asdict(n) for n in NOISES], "rounds": ROUNDS, "effects": EFFECTS},
        "cells": [dataclasses.asdict(c) for c in cells],
        "bars": [dataclasses.asdict(b) | {"holds": b.holds} for b in bars(cells)],
        "sittings": [
            {
                "name": s.name,
                "pad": s.pad,
                "seconds": s.seconds,
                "rounds": s.rounds,
                "load_average": s.load,
                "exit": int(s.judgement.code),
                "verdicts": dict(s.judgement.counted),
            }
            for s in sittings
        ],
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / "selftest.md").write_text(text + "\n", encoding="utf-8")
        (target / "selftest.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write to {target} ({error.strerror}); choose another with --results-dir"
        ) from error
