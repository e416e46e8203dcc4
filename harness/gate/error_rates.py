"""Error rates: whole judgements of many units under the noises of `simulate`, by the gate's rule and by those of others.

Three ways in which rounds come about:

    paired     each round is a fresh pair of processes that take turns; what is flagged gets a confirmation
    stored     each side is one run, in one process, on its own: what that process is stuck with is in all of its rounds
    imported   each side is several files, each of a process of its own, one side after the other

Units share nothing but the control case, which takes part in the sitting of a judgement: the hardest case for a family.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from harness.gate import peer_rules
from harness.gate.decide import Verdict, decide
from harness.gate.simulate import NOISES, TOLERANCE, Bar, Noise, times_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.gate.decide import Decision
    from harness.gate.policy import Policy
    from harness.gate.simulate import Array

Mode = Literal["stored", "paired", "imported"]
MODES: tuple[Mode, ...] = ("stored", "paired", "imported")
UNITS, ROUNDS = 50, 8
FEW = (
    1,
    4,
    7,
)  # units of a judgement that are too few to show how far processes differ; by the gate's rule alone
PLANTED = 0.10  # of one unit in ten
QUIET = 0.01  # standard deviation of a round's log ratio
RULES = ("t test", "sign flip", "pytest-benchmark", "asv", "perfgate-paired", "stackgate")
ALARM_BAR, POWER_BAR, PASS_BAR = 0.01, 0.95, 0.05


@dataclass(frozen=True, slots=True)
class Rate:
    """What one rule said under one noise."""

    mode: Mode
    noise: str
    rule: str
    judgements: int
    alarmed: int  # judgements of equal code in which any unit was called slower
    alarms: int  # units of equal code that were called slower
    found: float  # share of the units 10 % slower that were called so, where one in ten is
    undecided: float = math.nan  # share of the units of equal code
    passed: float = math.nan  # share of the units 10 % slower that were called OK
    units: int = UNITS


def rates(
    policy: Policy,
    judgements: int,
    seed: int = 0,
    noises: Sequence[Noise] = NOISES,
    modes: Sequence[Mode] = MODES,
) -> list[Rate]:
    """Every rule under every noise in every mode, and the gate's own with few units."""
    out = []
    for mode in modes:
        for place, noise in enumerate(noises):
            number = [seed, MODES.index(mode), place]
            out += _cell(policy, mode, noise, judgements, np.random.default_rng(number))
            for few in FEW:
                random = np.random.default_rng([*number, few])
                out += _cell(policy, mode, noise, judgements, random, few, RULES[:1])
    return out


def _cell(
    policy: Policy,
    mode: Mode,
    noise: Noise,
    judgements: int,
    random: np.random.Generator,
    units: int = UNITS,
    rules: Sequence[str] = RULES,
) -> list[Rate]:
    spread = 0.0 if mode == "paired" else policy.session_spread
    limit = math.log1p(TOLERANCE) + math.log1p(spread)
    slow = np.arange(units) % 10 == 0
    factor = np.where(slow, 1 + PLANTED, 1.0)
    counts = {rule: [0, 0, 0] for rule in rules}
    undecided = passed = 0
    for _ in range(judgements):
        equal = sample(mode, noise, units, ROUNDS, random)
        again = sample(mode, noise, units, policy.confirm_pairs, random) if mode == "paired" else None
        planted = equal * np.stack((np.ones(units), factor), axis=-1)[:, None, :, None]
        planted_again = None
        if again is not None:
            planted_again = again * np.stack((np.ones(units), factor), axis=-1)[:, None, :, None]
        for is_planted, times, fresh in ((False, equal, again), (True, planted, planted_again)):
            for rule in rules:
                flags, verdicts = _flags(rule, policy, times, fresh, limit, mode, random)
                if is_planted:
                    counts[rule][2] += int(flags[slow].sum())
                    passed += sum(verdict is Verdict.OK for verdict in verdicts[::10])
                else:
                    counts[rule][0] += bool(flags.any())
                    counts[rule][1] += int(flags.sum())
                    undecided += verdicts.count(Verdict.INCONCLUSIVE)
    return [
        Rate(
            mode,
            noise.name,
            rule,
            judgements,
            alarmed,
            alarms,
            found / (judgements * int(slow.sum())),
            undecided / (judgements * units) if rule == RULES[0] else math.nan,
            passed / (judgements * int(slow.sum())) if rule == RULES[0] else math.nan,
            units,
        )
        for rule, (alarmed, alarms, found) in counts.items()
    ]


def sample(mode: Mode, noise: Noise, units: int, rounds: int, random: np.random.Generator) -> Array:
    """Times [unit, round, side, sample] of equal sides."""
    if mode == "paired":
        return times_of(replace(noise, session=0.0), rounds, units, random)
    one_process = mode == "stored"
    calm = replace(noise, session=0.0)
    if one_process:  # what a process is born with is drawn once a side, below
        calm = replace(calm, process=0.0, clock=0.0, outlier=0.0, process_tail=0.0)
    sides = [times_of(calm, rounds, units, random)[:, :, side] for side in (0, 1)]
    times = np.stack(sides, axis=2)
    offset = noise.session * random.standard_normal((1, 1, 2, 1))
    if one_process:
        born = replace(noise, sample=0.0, drift=0.0, step=0.0, burst=0.0, trend=0.0, period=0.0, tick=0.0)
        born = replace(born, second=0.0, session=0.0)
        offset = offset + np.log(times_of(born, 1, units, random)[..., :1])
    return np.asarray(times * np.exp(offset))


def log_ratios(times: Array) -> Array:
    """Log ratios [unit, round] of the medians."""
    medians = np.median(times, axis=-1)
    return np.asarray(np.log(medians[..., 1] / medians[..., 0]))


def _flags(
    rule: str,
    policy: Policy,
    times: Array,
    again: Array | None,
    limit: float,
    mode: Mode,
    random: np.random.Generator,
) -> tuple[peer_rules.Flags, list[Verdict]]:
    """Which units a rule calls slower, and the verdicts of the gate's own rule."""
    if rule == "pytest-benchmark":
        return peer_rules.pytest_benchmark(times), []
    if rule == "asv":
        return peer_rules.asv(times), []
    if rule == "perfgate-paired":
        return peer_rules.perfgate_paired(times), []
    if rule == "stackgate":
        return peer_rules.stackgate(times, random), []
    first = log_ratios(times)
    second = log_ratios(again) if again is not None else np.empty((len(times), 0))
    if rule == "sign flip":
        return peer_rules.sign_flip(first, second, limit), []
    empty = np.empty(0)

    def decided(fresh: list[Array]) -> list[Decision]:
        return decide(
            list(first),
            fresh,
            [limit] * len(first),
            policy.alpha,
            policy.alpha_confirm,
            scatter=0.0 if mode == "paired" else policy.scatter,
            fresh=mode == "imported",
        )

    found = decided([empty] * len(first))
    if again is not None and any(d.flagged for d in found):
        found = decided([s if d.flagged else empty for s, d in zip(second, found, strict=True)])
    verdicts = [d.verdict for d in found]
    return np.array([verdict is Verdict.REGRESSED for verdict in verdicts]), verdicts


def quiet_power(policy: Policy, judgements: int, seed: int = 0) -> float:
    """Share of the units found where all of 50 are 10 % slower in 8 rounds that differ by 1 %, as stored runs."""
    random = np.random.default_rng(seed)
    limit = math.log1p(TOLERANCE) + math.log1p(policy.session_spread)
    hits = 0
    for _ in range(judgements):
        rounds = random.normal(math.log1p(PLANTED), QUIET, (UNITS, ROUNDS))
        found = decide(
            list(rounds),
            [np.empty(0)] * UNITS,
            [limit] * UNITS,
            policy.alpha,
            policy.alpha_confirm,
            scatter=policy.scatter,
        )
        hits += sum(d.verdict is Verdict.REGRESSED for d in found)
    return hits / (judgements * UNITS)


def rate_bars(found: Sequence[Rate], power: float) -> list[Bar]:
    """What is promised of whole judgements."""
    bars = [
        Bar(
            f"{UNITS} stored units 10% slower, {ROUNDS} rounds of 1%: found", power, POWER_BAR, True, "stored"
        )
    ]
    for mode in dict.fromkeys(r.mode for r in found):
        ours = [r for r in found if (r.mode, r.rule, r.units) == (mode, RULES[0], UNITS)]
        share = _share(ours)
        worst = max(ours, key=lambda r: r.alarmed)
        text = f"{mode} judgements of equal code that call a unit slower, {len(ours)} noises"
        where = f"worst: {worst.noise}, {worst.alarmed} of {worst.judgements}"
        bars.append(Bar(text, share, ALARM_BAR, False, where))
        few = [r for r in found if r.mode == mode and r.units != UNITS]
        groups = [[r for r in few if r.units == units] for units in FEW]
        share, where = max((_share(group), f"{group[0].units} units") for group in groups)
        bars.append(Bar(f"the same of {mode} judgements of few units", share, ALARM_BAR, False, where))
        all_units = [*ours, *few]
        slower = max(all_units, key=lambda r: r.passed)
        where = f"worst: {slower.noise}, {slower.units} units, {slower.passed:.0%}"
        text = f"{mode} units {PLANTED:.0%} slower that are called OK"
        bars.append(Bar(text, _mean(all_units, "passed"), PASS_BAR, False, where))
    return bars


def _share(found: Sequence[Rate]) -> float:
    """Judgements of equal code that called a unit slower, of all."""
    return sum(r.alarmed for r in found) / sum(r.judgements for r in found)


def rate_lines(found: Sequence[Rate], judgements: int) -> list[str]:
    """A table a mode: false alarms and detection of each rule under each noise."""
    lines = [
        "",
        f"Whole judgements: {UNITS} units, {ROUNDS} rounds, {judgements} judgements a cell, by the rule of this gate (t "
        "test), the one it had before (sign flip) and those of other gates, as documented. A cell: judgements of equal code "
        f"in which any unit was called slower, in %, / units {PLANTED:.0%} slower (one in ten) that were found, in %.",
    ]
    lines += ["", "| all noises | " + " | ".join(RULES) + " |", "|---|" + "---|" * len(RULES)]
    for mode in dict.fromkeys(r.mode for r in found):
        cells = []
        for rule in RULES:
            these = [r for r in found if (r.mode, r.rule, r.units) == (mode, rule, UNITS)]
            cells.append(f"{100 * _share(these):.1f} / {100 * _mean(these, 'found'):.0f}")
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    lines += _few_lines(found)
    for mode in dict.fromkeys(r.mode for r in found):
        table = {(r.noise, r.rule): r for r in found if (r.mode, r.units) == (mode, UNITS)}
        lines += [
            "",
            f"| {mode} | " + " | ".join(RULES) + " | undecided, equal code |",
            "|---|" + "---|" * (len(RULES) + 1),
        ]
        for noise in dict.fromkeys(r.noise for r in found):
            row = [table[noise, rule] for rule in RULES]
            cells = [f"{100 * r.alarmed / r.judgements:.1f} / {100 * r.found:.0f}" for r in row]
            lines.append(f"| {noise} | {' | '.join(cells)} | {row[0].undecided:.0%} |")
    return lines


def _few_lines(found: Sequence[Rate]) -> list[str]:
    """The gate's own rule by the number of units."""
    lines = [
        "",
        "By the number of units in a judgement, by the rule of this gate over all noises, in %: judgements of equal code in "
        f"which any unit was called slower; units {PLANTED:.0%} slower that were found, and that were called OK; units of "
        "equal code that stayed undecided.",
        "",
        "| mode | units | called slower | found | slower and called OK | undecided |",
        "|---|---|---|---|---|---|",
    ]
    for mode in dict.fromkeys(r.mode for r in found):
        for units in (*FEW, UNITS):
            these = [r for r in found if (r.mode, r.rule, r.units) == (mode, RULES[0], units)]
            shares = (_mean(these, name) for name in ("found", "passed", "undecided"))
            cells = [f"{100 * _share(these):.1f}", *(f"{100 * share:.1f}" for share in shares)]
            lines.append(f"| {mode} | {units} | {' | '.join(cells)} |")
    return lines


def _mean(found: Sequence[Rate], name: str) -> float:
    return float(sum(getattr(r, name) for r in found)) / len(found)
