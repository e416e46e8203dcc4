"""How often the gate is wrong: its decisions, and those of other gates, on times whose noise and truth are known.

    python reports/studies/gate_error_rates.py [--trials N] [--judgements N] [PAGE ...]

Prints the tables, writes them between their marks in each PAGE, and exits with 1 where a promise is broken.

Times are drawn as a session takes them: a round is a pair of processes that take turns, block by block; what comes out of
a round is the ratio of the two medians. The noise has four layers, all on the logarithm of a time: of a sample, of a
process (drawn once for its life), of the machine (shared by blocks that follow one another), and of a clock that has two
states. Levels are chosen, not measured. Verdicts come from `harness.gate.decide`, which judges real runs.

Rounds come about in three ways:

    paired     each round is a fresh pair of processes that take turns; where more rounds settle what is open, the first stage is
               made longer, again and again, as if time allowed ten times its rounds; what is flagged gets a confirmation
    stored     each side is one run, in one process, on its own: what that process is stuck with is in all of its rounds
    imported   each side is several files, each of a process of its own, one side after the other

| rule of another gate | decides by |
|---|---|
| pytest-benchmark | `--benchmark-compare-fail=min:5%`: one run's minimum more than 5 % above one saved run's |
| asv | `asv compare`, `asv continuous`: ratio of the medians above 1.1 and Mann-Whitney's U test p < 0.002 |
| perfgate-paired | the 95 % interval of the mean difference of the pairs, mean -+ 2 s / sqrt(n) below 30 pairs, lies above 0 |
| stackgate | permutation test of the runs, q <= 0.05 by Benjamini and Hochberg, and at least 2 % slower |
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.stats
from documented_table import fill

from harness.gate.decide import UnitDecision, UnitVerdict, decide, missing
from harness.gate.policy import Policy, load_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Flags = NDArray[np.bool_]

FEWEST = 100  # trials or judgements that can show a rate of 1 %
BLOCKS, SAMPLES = 4, 5  # of a process
GRID_ROUNDS = (5, 6, 8, 10, 16)  # five: what the time allowed holds on a busy machine
EFFECTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)  # in tolerances
TOLERANCE = 0.03
MODES = ("stored", "paired", "imported")
UNITS, ROUNDS = 50, 8  # of a judgement
MORE = 9  # times its rounds, by which the first stage can be made longer in all
FEW = (1, 4, 7)  # units that are too few to show how far processes differ; by the gate's rule alone
PLANTED = 0.10  # of one unit in ten
OURS = "t test"
PERMUTATIONS = 2000


@dataclass(frozen=True)
class Noise:
    """One noise model; standard deviations of the logarithm of a time."""

    name: str
    sample: float = 0.01
    process: float = 0.003
    drift: float = 0.0  # AR(1) from block to block
    memory: float = 0.9  # its coefficient
    step: float = 0.0  # the machine slows by this, for good, at a random block
    clock: float = 0.0  # a process runs at the lower of two clocks, this far apart
    low_clock: float = 0.3  # how often
    tail: float = 0.0  # degrees of freedom of Student's t for the samples; 0: Gaussian
    outlier: float = 0.0  # how often a process is slow as a whole, by 5 % times |normal|
    process_tail: float = 0.0  # degrees of freedom of Student's t for the processes; 0: Gaussian
    burst: float = 0.0  # share of the samples that are interrupted, each 1 to 5 times as long
    trend: float = 0.0  # the machine slows steadily by this over the sitting
    period: float = 0.0  # amplitude of a slow wave, eight turns long
    tick: float = 0.0  # a clock of this resolution, as a share of the time
    second: float = 0.0  # whoever goes second in a turn is this much slower
    session: float = 0.0  # of a whole sitting; cancels where both sides are measured together


NOISES = (
    Noise("Gaussian"),
    Noise("heavy tail", tail=2.0),
    Noise("bimodal clock", clock=0.05),
    Noise("drift", drift=0.03),
    Noise("step", step=0.08),
    Noise("per process", process=0.02),
    Noise("boost clocks", process=0.01, drift=0.01),
    Noise("noisy runner", sample=0.03, process=0.05, drift=0.05, outlier=0.1),
    Noise("quiet", sample=0.001, process=0.0003),
    Noise("interrupted", burst=0.2),
    Noise("half interrupted", burst=0.45),
    Noise("heavy-tailed processes", process=0.005, process_tail=3.0),
    Noise("two layouts", clock=0.1, low_clock=0.5),
    Noise("warming up", trend=0.05),
    Noise("slow wave", period=0.03),
    Noise("coarse clock", tick=0.01),
    Noise("second is slower", second=0.01),
    Noise("sessions", session=0.01),
)
GRID = NOISES[:8]  # by rounds and effects; all of them in whole judgements


@dataclass(frozen=True)
class Cell:
    """Shares of the trials of one cell of the grid."""

    noise: str
    rounds: int
    effect: float  # in tolerances
    regressed: float
    okay: float
    covered: float  # intervals of the first stage that hold the truth
    longer: float  # the same, after the rounds by which it was made longer


@dataclass(frozen=True)
class Rate:
    """What one rule said under one noise."""

    mode: str
    noise: str
    rule: str
    units: int
    alarmed: float  # share of the judgements of equal code in which any unit was called slower
    found: float  # share of the units 10 % slower that were called so, where one in ten is
    undecided: float = math.nan  # share of the units of equal code
    passed: float = math.nan  # share of the units 10 % slower that were called OK


@dataclass(frozen=True)
class Promise:
    """A bound, and the worst figure over the cells that it is about."""

    text: str
    worst: float
    where: str
    bound: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.worst >= self.bound if self.at_least else self.worst <= self.bound


def times_of(noise: Noise, rounds: int, trials: int, random: np.random.Generator) -> Array:
    """Times [trials, rounds, side, sample] of two sides that are equal."""
    shape = (trials, rounds, 2)  # the last axis: baseline, candidate
    each = (*shape, BLOCKS, SAMPLES)

    def drawn(degrees: float, size: tuple[int, ...]) -> Array:
        return random.standard_t(degrees, size) if degrees else random.standard_normal(size)

    logs = noise.sample * drawn(noise.tail, each)
    if noise.burst:
        logs += np.log(np.where(random.random(each) < noise.burst, 1 + 4 * random.random(each), 1.0))
    process = noise.process * drawn(noise.process_tail, shape)
    process -= noise.clock * (random.random(shape) < 1 - noise.low_clock)
    if noise.outlier:
        process += (random.random(shape) < noise.outlier) * 0.05 * np.abs(random.standard_normal(shape))
    logs += process[..., None, None]
    logs += noise.session * random.standard_normal((trials, 1, 1, 1, 1))
    if noise.drift or noise.step or noise.trend or noise.period or noise.second:
        logs += _of_the_machine(noise, rounds, trials, random)[..., None]
    times = np.exp(logs).reshape(*shape, BLOCKS * SAMPLES)
    return np.maximum(np.round(times / noise.tick), 1) * noise.tick if noise.tick else times


def _of_the_machine(noise: Noise, rounds: int, trials: int, random: np.random.Generator) -> Array:
    """What both sides share, by place in time: [trials, rounds, side, block], the sides taking turns."""
    slots = rounds * BLOCKS * 2
    level = np.empty((trials, slots))
    level[:, 0] = noise.drift * random.standard_normal(trials)
    fresh = math.sqrt(1 - noise.memory**2) * noise.drift
    for slot in range(1, slots):
        level[:, slot] = noise.memory * level[:, slot - 1] + fresh * random.standard_normal(trials)
    place = np.arange(slots)
    level += noise.step * (place >= random.integers(0, slots, size=(trials, 1)))
    phase = random.random((trials, 1))
    level += noise.trend * place / slots + noise.period * np.sin(2 * np.pi * (place / 16 + phase))
    turns = level.reshape(trials, rounds, BLOCKS, 2) + noise.second * np.arange(2)
    swap = random.random((trials, rounds, BLOCKS)) < 0.5  # which side goes first is drawn for each turn
    turns = np.where(swap[..., None], turns[..., ::-1], turns)
    return np.moveaxis(turns, -1, -2)


def log_ratios(times: Array) -> Array:
    """Log ratios [unit, round] of the medians."""
    medians = np.median(times, axis=-1)
    return np.log(medians[..., 1] / medians[..., 0])


def grid(
    policy: Policy,
    trials: int,
    seed: int = 0,
    noises: Sequence[Noise] = GRID,
    rounds: Sequence[int] = GRID_ROUNDS,
) -> list[Cell]:
    """Every cell: noise x rounds x effect, both stages. One draw of noise serves all effects of a cell."""
    cells = []
    limits = [math.log1p(TOLERANCE)] * trials
    empty = np.empty(0)
    for (place, noise), count in itertools.product(enumerate(noises), rounds):
        random = np.random.default_rng([seed, place, count])
        first = log_ratios(times_of(noise, count, trials, random))
        second = log_ratios(times_of(noise, policy.confirm_pairs, trials, random))
        more = log_ratios(times_of(noise, MORE * count, trials, random))
        for effect in EFFECTS:
            truth = math.log1p(effect * TOLERANCE)
            levels = (limits, policy.alpha, policy.alpha_confirm)
            alone = decide(list(first + truth), [empty] * trials, *levels, one_run=False)
            covered = [sum(d.low <= truth <= d.high for d in alone)]
            longer, looks = list(first + truth), [1] * trials
            while True:
                ahead = _looked([n + 1 for n in looks], longer, [empty] * trials, *levels)
                now = _looked(looks, longer, [empty] * trials, *levels)
                extra = [
                    _added([one], [then], len(rows), MORE * count + count - len(rows))
                    for one, then, rows in zip(now, ahead, longer, strict=True)
                ]
                if not any(extra):
                    break
                for i, n in enumerate(extra):
                    used = len(longer[i]) - count
                    longer[i] = np.concatenate((longer[i], more[i][used : used + n] + truth))
                    looks[i] += n > 0
            again = [s + truth if d.flagged else empty for s, d in zip(second, now, strict=True)]
            both = Counter(d.verdict for d in _looked(looks, longer, again, *levels))
            covered.append(sum(d.low <= truth <= d.high for d in now))
            shares = (n / trials for n in (both[UnitVerdict.REGRESSED], both[UnitVerdict.OK], *covered))
            cells.append(Cell(noise.name, count, effect, *shares))
    return cells


def _looked(looks: Sequence[int], rows: list[Array], again: list[Array], *levels: Any) -> list[UnitDecision]:
    """Decisions on trials, each as the look that it is."""
    of = {n: decide(rows, again, *levels, one_run=False, looks=n) for n in set(looks)}
    return [of[n][i] for i, n in enumerate(looks)]


def _added(now: Sequence[UnitDecision], ahead: Sequence[UnitDecision], rounds: int, left: int) -> int:
    """Rounds by which what is open makes the first stage longer, of which so many are left."""
    still = [b for a, b in zip(now, ahead, strict=True) if a.verdict is UnitVerdict.INCONCLUSIVE]
    return missing(still, rounds, left)


def promises(cells: Sequence[Cell]) -> list[Promise]:
    """The gate's promises over a grid."""
    boosted, noisy = ("boost clocks", 10, 2), ("noisy runner", 1)
    out = []
    for text, bound, at_least, figure, about in (
        ("false alarms at no change", 0.01, False, "regressed", lambda c: c.effect == 0),
        ("false alarms at exactly the tolerance", 0.05, False, "regressed", lambda c: c.effect == 1),
        ("power at twice the tolerance, boost clocks, 10 rounds", 0.95, True, "regressed", lambda c: (c.noise, c.rounds, c.effect) == boosted),
        ("coverage of the 95 % interval", 0.93, True, "covered", lambda c: True),
        ("the same where open cases got more rounds", 0.93, True, "longer", lambda c: True),
        ("coverage, Gaussian noise, from above", 0.97, False, "covered", lambda c: c.noise == "Gaussian"),
        ("called OK at exactly the tolerance, noisy runner", 0.07, False, "okay", lambda c: (c.noise, c.effect) == noisy),
    ):  # fmt: skip
        found = [(getattr(c, figure), f"{c.noise}, {c.rounds} rounds") for c in cells if about(c)]
        if found:
            worst, where = (min if at_least else max)(found)
            out.append(Promise(text, worst, where, bound, at_least))
    return out


def sample(mode: str, noise: Noise, units: int, rounds: int, random: np.random.Generator) -> Array:
    """Times [unit, round, side, sample] of equal sides."""
    calm = replace(noise, session=0.0)
    if mode == "paired":
        return times_of(calm, rounds, units, random)
    if mode == "stored":  # what a process is born with is drawn once a side, below
        calm = replace(calm, process=0.0, clock=0.0, outlier=0.0, process_tail=0.0)
    times = np.stack([times_of(calm, rounds, units, random)[:, :, side] for side in (0, 1)], axis=2)
    offset = noise.session * random.standard_normal((1, 1, 2, 1))
    if mode == "stored":
        of_process = ("name", "process", "clock", "low_clock", "outlier", "process_tail")
        born = Noise(**{name: getattr(noise, name) for name in of_process}, sample=0.0)
        offset = offset + np.log(times_of(born, 1, units, random)[..., :1])
    return times * np.exp(offset)


def pytest_benchmark(times: Array) -> Flags:
    """One run against one saved run: the first baseline process, the last candidate process."""
    return times[:, -1, 1].min(axis=-1) > 1.05 * times[:, 0, 0].min(axis=-1)


def asv(times: Array) -> Flags:
    """All samples of a side as one."""
    before, after = np.moveaxis(times, 2, 0).reshape(2, len(times), -1)
    p = scipy.stats.mannwhitneyu(after, before, axis=-1, method="asymptotic", use_continuity=False).pvalue
    return (np.median(after, axis=-1) / np.median(before, axis=-1) > 1.1) & (p < 0.002)


def perfgate_paired(times: Array) -> Flags:
    """The paired t test whose t is a constant."""
    differences = np.diff(np.median(times, axis=-1), axis=-1)[..., 0]
    count = differences.shape[-1]
    error = differences.std(axis=-1, ddof=1) / math.sqrt(count)
    return differences.mean(axis=-1) - (2.0 if count < 30 else 1.96) * error > 0


def stackgate(times: Array, random: np.random.Generator) -> Flags:
    """Runs of both sides relabelled at random; Benjamini and Hochberg over the units."""
    medians = np.median(times, axis=-1)
    runs = np.concatenate((medians[..., 0], medians[..., 1]), axis=-1)
    count = medians.shape[1]
    labels = np.where(np.arange(2 * count) < count, -1.0, 1.0)
    orders = random.random((PERMUTATIONS, 2 * count)).argsort(axis=-1)
    observed = runs @ labels
    reached = runs @ labels[orders].T >= observed[:, None] - 1e-12 * np.abs(runs).sum(axis=-1)[:, None]
    q = scipy.stats.false_discovery_control((1 + reached.sum(axis=-1)) / (1 + PERMUTATIONS))
    return (q <= 0.05) & (observed / runs[:, :count].sum(axis=-1) >= 0.02)


def verdicts(
    policy: Policy, mode: str, first: Array, second: Array | None, limit: float, more: Array | None = None
) -> list[UnitVerdict]:
    """The gate's own; `more`: the rounds by which it may make the first stage longer."""
    empty = [np.empty(0)] * len(first)
    own: dict[str, Any] = {
        "scatter": 0.0 if mode == "paired" else policy.scatter,
        "fresh": mode == "imported",
    }
    levels = ([limit] * len(first), policy.alpha, policy.alpha_confirm)
    found, used = decide(list(first), empty, *levels, **own), 0
    while more is not None:
        looks = own.get("looks", 1) + 1
        ahead = decide(list(first), empty, *levels, **own | {"looks": looks})
        if not (rounds := _added(found, ahead, first.shape[1], more.shape[1] - used)):
            break
        first, own["looks"] = np.concatenate((first, more[:, used : used + rounds]), axis=1), looks
        used += rounds
        found = decide(list(first), empty, *levels, **own)
    if second is not None and any(d.flagged for d in found):
        again = [s if d.flagged else e for s, d, e in zip(second, found, empty, strict=True)]
        found = decide(list(first), again, *levels, **own)
    return [d.verdict for d in found]


RULES = (OURS, "pytest-benchmark", "asv", "perfgate-paired", "stackgate")


def rates(policy: Policy, judgements: int, seed: int = 0, noises: Sequence[Noise] = NOISES) -> list[Rate]:
    """Every rule under every noise in every mode, and the gate's own with few units.

    Units share nothing but the control case, which takes part in the sitting of a judgement: the hardest case for Holm.
    """
    out = []
    for (number, mode), (place, noise), units in itertools.product(
        enumerate(MODES), enumerate(noises), (UNITS, *FEW)
    ):
        random = np.random.default_rng([seed, number, place, units])
        out += _of(policy, mode, noise, judgements, units, random)
    return out


def _of(
    policy: Policy,
    mode: str,
    noise: Noise,
    judgements: int,
    units: int,
    random: np.random.Generator,
) -> list[Rate]:
    limit = math.log1p(TOLERANCE) + (0.0 if mode == "paired" else math.log1p(policy.session_spread))
    slow = np.arange(units) % 10 == 0
    alarmed, found, open_, passed = Counter[str](), Counter[str](), 0, 0
    for _ in range(judgements):
        equal = sample(mode, noise, units, ROUNDS, random)
        again, more = (
            sample(mode, noise, units, rounds, random) if mode == "paired" else None
            for rounds in (policy.confirm_pairs, MORE * ROUNDS)
        )
        for planted in (0.0, PLANTED):
            factor = np.stack((np.ones(units), np.where(slow, 1 + planted, 1.0)), axis=-1)[:, None, :, None]
            times = equal * factor
            first = log_ratios(times)
            second, longer = (None if x is None else log_ratios(x * factor) for x in (again, more))
            ours = verdicts(policy, mode, first, second, limit, longer)
            flags = {OURS: np.array([v is UnitVerdict.REGRESSED for v in ours])}
            if units == UNITS:
                flags |= {
                    "pytest-benchmark": pytest_benchmark(times),
                    "asv": asv(times),
                    "perfgate-paired": perfgate_paired(times),
                    "stackgate": stackgate(times, random),
                }
            for rule, slower in flags.items():
                if planted:
                    found[rule] += int(slower[slow].sum())
                else:
                    alarmed[rule] += bool(slower.any())
            if planted:
                passed += ours[::10].count(UnitVerdict.OK)
            else:
                open_ += ours.count(UnitVerdict.INCONCLUSIVE)
    planted_units = judgements * int(slow.sum())
    more = {OURS: (open_ / (judgements * units), passed / planted_units)}
    return [
        Rate(mode, noise.name, r, units, alarmed[r] / judgements, found[r] / planted_units, *more.get(r, ()))
        for r in (RULES if units == UNITS else RULES[:1])
    ]


def mean(found: Sequence[Rate], figure: str) -> float:
    return sum(getattr(r, figure) for r in found) / len(found)


def rate_promises(found: Sequence[Rate]) -> list[Promise]:
    """What is promised of whole judgements."""
    out = []
    for mode in MODES:
        all_units = [r for r in found if (r.mode, r.rule) == (mode, OURS)]
        by_units = {n: [r for r in all_units if r.units == n] for n in (*FEW, UNITS)}
        many = by_units.pop(UNITS)
        loud, slow = max(many, key=lambda r: r.alarmed), max(all_units, key=lambda r: r.passed)
        share, units = max((mean(group, "alarmed"), n) for n, group in by_units.items())
        out += [
            Promise(f"{mode} judgements of equal code that call a unit slower, {len(many)} noises", mean(many, "alarmed"), f"worst: {loud.noise}, {loud.alarmed:.0%}", 0.01),
            Promise(f"the same of {mode} judgements of few units", share, f"{units} units", 0.01),
            Promise(f"{mode} units {PLANTED:.0%} slower that are called OK", mean(all_units, "passed"), f"worst: {slow.noise}, {slow.units} units, {slow.passed:.0%}", 0.05),
        ]  # fmt: skip
    return out


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def tables(cells: Sequence[Cell], found: Sequence[Rate], kept: Sequence[Promise]) -> dict[str, str]:
    """By the name of their marks in a page."""

    def both(rows: Sequence[Rate], figures: str = ".1f") -> str:
        return f"{100 * mean(rows, 'alarmed'):{figures}} / {100 * mean(rows, 'found'):.0f}"

    of = {(r.mode, r.rule, r.noise, r.units): r for r in found}
    noises = list(dict.fromkeys(r.noise for r in found))
    shares = [
        [p.text, f"{p.worst:.1%} ({p.where})", f"at {'least' if p.at_least else 'most'} {p.bound:.0%}", "yes" if p.holds else "NO"]
        for p in kept
    ]  # fmt: skip
    grid_rows = [
        [noise, str(rounds), *(f"{100 * c.regressed:.1f} / {100 * c.okay:.1f}" for c in row), f"{row[0].covered:.1%}"]
        for (noise, rounds), row in ((key, list(row)) for key, row in itertools.groupby(cells, lambda c: (c.noise, c.rounds)))
    ]  # fmt: skip
    few = [
        [mode, str(n), *(f"{100 * mean([of[mode, OURS, x, n] for x in noises], f):.1f}" for f in ("alarmed", "found", "passed", "undecided"))]
        for mode in MODES
        for n in (*FEW, UNITS)
    ]  # fmt: skip
    everything = [[m, *(both([of[m, r, x, UNITS] for x in noises]) for r in RULES)] for m in MODES]
    return {
        "promises": table(["promise", "worst cell", "bar", "holds"], shares),
        "grid": table(["noise", "rounds", *(f"{e:g}" for e in EFFECTS), "coverage"], grid_rows),
        "all": table(["all noises", *RULES], everything),
        "few": table(["mode", "units", "called slower", "found", "slower and called OK", "undecided"], few),
        **{
            mode: table(
                [mode, *RULES, "undecided, equal code"],
                [[x, *(both([of[mode, r, x, UNITS]]) for r in RULES), f"{of[mode, OURS, x, UNITS].undecided:.0%}"] for x in noises],
            )
            for mode in MODES
        },
    }  # fmt: skip


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=2000, help="of each cell of the grid")
    parser.add_argument("--judgements", type=int, default=100, help="a noise and mode")
    parser.add_argument("pages", nargs="*", type=Path)
    options = parser.parse_args(words)
    if min(options.trials, options.judgements) < FEWEST:
        parser.error(f"fewer than {FEWEST} trials or judgements cannot measure rates of 1 %")
    policy = load_policy()
    cells, found = grid(policy, options.trials), rates(policy, options.judgements)
    kept = [*promises(cells), *rate_promises(found)]
    made = tables(cells, found, kept)
    for page in options.pages:
        fill(page, made)
    print("\n\n".join(f"{name}\n\n{text}" for name, text in made.items()))
    return 0 if all(p.holds for p in kept) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
