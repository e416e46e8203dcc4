"""TrialResult: what a trial found, the one record of which its words and its rows are views. Pure functions of the rounds."""

from __future__ import annotations

import html
import math
import random
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from harness.machine import hardware, mfu
from harness.store import stats
from harness.store.compare import TIE
from harness.store.errors import UsageError
from harness.store.stats import MIN_ROUNDS, t_interval
from harness.store.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterator


BASE, AGAIN, FP8 = "base", "base:again", "fp8"
ARMS = (BASE, AGAIN, FP8)
# What a step is for: `warm` and `lead` are not timed; `compare` and `count` are the two steps of the proof; `none` counts
# the FP8 GEMMs of a bf16 step, of which there must be none.
Purpose = Literal["warm", "compare", "count", "none", "lead", "timed"]
# Each precision runs two untimed steps before it is looked at: the first compiles, the second shows that it is done
_BEFORE: dict[str, tuple[Purpose, ...]] = {
    BASE: ("warm", "warm", "none"),
    FP8: ("warm", "warm", "compare", "count"),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """What one step of the loop is for.

    Attributes:
        arm: one of `ARMS`.
        purpose: see `Purpose`.
        round: of the block; -1 before the first.
    """

    arm: str
    purpose: Purpose
    round: int = -1

    @property
    def is_fp8(self) -> bool:
        """Whether the step runs in FP8."""
        return self.arm == FP8


@dataclass(frozen=True, slots=True)
class Plan:
    """How the steps of a trial are dealt.

    Attributes:
        steps: of the loop that the trial may take, all in all.
        block: timed steps after each switch.
        lead: untimed steps after each switch.
        seed: of the order of the blocks in each round; the same on all ranks.

    Raises:
        UsageError: too few steps for an interval, or a count below its least.
    """

    steps: int = 200
    block: int = 4
    lead: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("block", 1), ("lead", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name}={value!r}: expected an integer of at least {least}")
        if self.rounds < MIN_ROUNDS:
            before, each = len(self.preparation), self.per_round
            raise UsageError(
                f"steps={self.steps}: an interval needs {MIN_ROUNDS} rounds of {each} steps after {before} that warm up and "
                f"prove; give steps={before + MIN_ROUNDS * each} or more, about steps={before + 12 * each} for a narrow one"
            )

    @property
    def per_round(self) -> int:
        """Steps of a round: a block of each arm."""
        return len(ARMS) * (self.block + self.lead)

    @property
    def preparation(self) -> list[Turn]:
        """The steps before the first block: each precision warms up, then is proved."""
        return [Turn(arm, purpose) for arm, purposes in _BEFORE.items() for purpose in purposes]

    @property
    def rounds(self) -> int:
        """Whole rounds that fit."""
        return (self.steps - len(self.preparation)) // self.per_round

    def turns(self) -> Iterator[Turn]:
        """What each step is for, in order."""
        yield from self.preparation
        for index in range(self.rounds):
            for arm in self.order(index):
                yield from [Turn(arm, "lead", index)] * self.lead
                yield from [Turn(arm, "timed", index)] * self.block

    def order(self, index: int) -> tuple[str, ...]:
        """The arms of a round, in an order drawn for it alone."""
        return tuple(random.Random(f"{self.seed}/{index}").sample(ARMS, len(ARMS)))


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.store.stats import Effect

    ByArm = Mapping[str, tuple[float, ...]]

Decision = Literal["on", "off", "cannot tell"]
# How what all ranks have seen of a step becomes one number
_JOIN: dict[str, Callable[[list[float]], float]] = {
    "times_ms": max,
    "gaps_ms": max,
    "losses": statistics.fmean,
    "peak_bytes": max,
    "joules": statistics.fmean,
}


@dataclass(frozen=True, slots=True)
class Round:
    """One round, of all ranks.

    Attributes:
        times_ms: of each arm the timed steps; of each step the slowest rank's.
        gaps_ms: of each arm the time between its steps, the longest of all ranks.
        losses: of each arm the mean over ranks of each step's loss, where all saw one in every step.
        faults: arm -> why its block counts for nothing.
        peak_bytes: of each arm the most memory of any rank in each timed step, where the device tells.
        joules: of each arm whose block every rank could read those of a step with what runs between steps, a mean of all
            ranks' boards.
    """

    index: int
    times_ms: ByArm
    gaps_ms: ByArm = field(default_factory=dict)
    losses: ByArm = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    peak_bytes: ByArm = field(default_factory=dict)
    joules: ByArm = field(default_factory=dict)

    def has(self, *arms: str) -> bool:
        """Whether the blocks of these arms count."""
        return all(self.times_ms.get(arm) and arm not in self.faults for arm in arms)

    def log_ratio(self, arm: str, other: str) -> float:
        """log(median time of `other` / median time of `arm`)."""
        return math.log(statistics.median(self.times_ms[other]) / statistics.median(self.times_ms[arm]))


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a trial found.

    Attributes:
        recipe: of the FP8 layers.
        device: "cpu" or "cuda".
        rounds: all that were taken, those that count for nothing included.
        method: how time was read.
        ranks: processes.
        proof: line of the proof; "" where it did not come so far.
        proved: FP8 was proved on every rank, and bf16 steps ran none.
        problem: why the trial gives no answer at all; "" if it may.
        tokens: rows of a step that the Linear layers of one rank multiply; None where they are not known, as under tensor
            parallelism.
        under_way: rounds are still to come; nothing is decided before.
        flops: of the model in a step of one rank by dtype, for "base" and "fp8", counted once on a real batch; what
            bf16 steps multiply the FP8 products in is "unknown" where the step had no other product.
        unmetered: why no energy was measured, where none was.
        gpu: name and memory in GiB of the GPU; None on another device.
        steps_run: steps taken in FP8 and in bf16, warm-up included.
        ends_in: precision in which the model was left.
        restored: names of what was put back; None where nothing was asked for or it is not put back.
        not_restored: why what was to be put back is not; "" if it is, or nothing was asked for.
        notes: what could not be watched.
        layers: FP8 layers of the model.
        facts: of the proof, for the store.
    """

    recipe: str
    device: str
    rounds: tuple[Round, ...] = ()
    method: str = ""
    ranks: int = 1
    proof: str = ""
    proved: bool = False
    problem: str = ""
    tokens: float | None = None
    under_way: bool = False
    flops: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unmetered: str = ""
    gpu: tuple[str, float] | None = None
    steps_run: tuple[int, int] = (0, 0)
    ends_in: str = "bf16"
    restored: tuple[str, ...] | None = None
    not_restored: str = ""
    notes: tuple[str, ...] = ()
    layers: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def refused(self) -> str:
        """Why no ratio, time or energy may be told at all; "" if they may."""
        if self.problem or self.proved:
            return self.problem
        return f"FP8 is not proved: {self.proof or 'the steps of the proof were not reached'}"

    @property
    def control(self) -> Effect:
        """The A/A control: bf16 against bf16."""
        return stats.paired([r.log_ratio(BASE, AGAIN) for r in self.rounds if r.has(BASE, AGAIN)])

    @property
    def floor(self) -> float:
        """A/A noise floor: how far two blocks in bf16 may seem apart, as a ratio >= 1; NaN below the least rounds."""
        found = self.control
        return math.exp(max(abs(found.log_low), abs(found.log_high))) if found.has_interval else math.nan

    @property
    def effect(self) -> Effect:
        """FP8 over bf16, paired by round; `speedup` above 1: FP8 is faster."""
        return stats.paired([-r.log_ratio(FP8, BASE) for r in self.rounds if r.has(FP8, BASE)], self.floor)

    def seen(self, name: str, *arms: str) -> list[tuple[int, float]]:
        """(round, value) of what the blocks of these arms that count have under a name of `Round`'s."""
        return [
            (r.index, value)
            for r in self.rounds
            for arm in arms
            if r.has(arm)
            for value in getattr(r, name).get(arm, ())
        ]

    def median_ms(self, arm: str) -> float:
        """Median step of an arm; NaN without one."""
        return _median(self.seen("times_ms", arm))

    @property
    def gap_ms(self) -> float:
        """Median time between steps: data loader and whatever else runs outside of `step()`; NaN without one."""
        return _median(self.seen("gaps_ms", *ARMS))

    @property
    def peak_bytes(self) -> dict[str, float]:
        """Most memory of a timed step of any rank, by arm; empty where the device keeps none."""
        return {arm: max(peak for _, peak in seen) for arm in ARMS if (seen := self.seen("peak_bytes", arm))}

    @property
    def joules(self) -> dict[str, tuple[tuple[int, float], ...]]:
        """(round, joules of a step with what runs between steps) of each block that was read, by arm; empty without any."""
        return {arm: tuple(seen) for arm in ARMS if (seen := self.seen("joules", arm))}

    @property
    def peaks(self) -> hardware.Device | None:
        """The GPU in the table of peaks; None where it is not in it."""
        return hardware.lookup(*self.gpu) if self.gpu else None

    @property
    def mfu(self) -> dict[str, mfu.Utilization]:
        """How well the median steps of bf16 and of FP8 use the GPU, where they have times and FLOPs."""
        return {
            arm: mfu.utilization(flops, self.median_ms(arm) / 1e3, self.peaks, tokens=self.tokens)
            for arm, flops in self.flops.items()
            if flops and self.median_ms(arm) > 0
        }

    @property
    def loss_gap(self) -> tuple[float, float, float] | None:
        """Relative loss gap of FP8's blocks, mean and 95 % interval over rounds; None where no loss was seen."""
        losses = [[r.losses.get(arm) for arm in (FP8, BASE)] for r in self.rounds if r.has(FP8, BASE)]
        means = [[statistics.fmean(of_arm) for of_arm in each if of_arm] for each in losses]
        gaps = [each[0] / each[1] - 1 for each in means if len(each) == 2 and each[1]]
        if len(gaps) < stats.MIN_ROUNDS or not all(map(math.isfinite, gaps)):
            return None
        return (statistics.fmean(gaps), *t_interval(gaps))

    @property
    def doubt(self) -> str:
        """Why nothing can be decided of FP8 against bf16; "" where the times decide."""
        found = self.effect
        if self.under_way and not self.problem:
            return (
                "the trial is under way; on several ranks call trial.close() on all of them to end it early"
            )
        if self.refused:
            return self.refused
        if not found.has_interval:
            faults = "; ".join(sorted({fault for r in self.rounds for fault in r.faults.values()}))
            return f"{found.rounds} rounds count{faults and f' ({faults})'}; an interval needs {stats.MIN_ROUNDS}"
        if self.device != "cuda":
            return f"a {self.device} multiplies FP8 codes in float32: its times say nothing of a GPU's"
        if math.isnan(self.floor):
            return "there is no A/A control"
        high = math.exp(-found.log_low)
        if found.direction == "unclear" or (found.direction == "same" and high > TIE):
            return (
                f"two copies of bf16 seem up to {self.floor:.3f}x apart here and the interval reaches {high:.3f}x: neither a "
                "gain nor a tie is shown; take more steps, or a quieter machine"
            )
        return ""

    @property
    def decision(self) -> Decision:
        """For speed alone: on where FP8 is known to be faster, off where it is known to be slower or shown to be a tie."""
        if self.doubt:
            return "cannot tell"
        return "on" if self.effect.direction == "faster" else "off"

    @property
    def beside(self) -> list[str]:
        """Counts of what a reader of the decision must look at below it."""
        blocks = sum(len(each.faults) for each in self.rounds)
        counts = ((blocks, "block"), (len(self.notes), "note"))
        found = [
            f"{plural(count, one)} {'left out, ' * (one == 'block')}below" for count, one in counts if count
        ]
        return found + ["not all was put back"] * bool(self.not_restored)

    def _repr_html_(self) -> str:
        lines = html.escape("\n".join(self.lines()))
        return f"<pre>{lines}</pre>"

    def lines(self) -> list[str]:
        """The answer, in at most 20 lines."""
        shown = {arm: self.median_ms(arm) for arm in (BASE, FP8)}
        text = _template().render(r=self, ms=shown, mean=statistics.fmean)
        return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def merged(index: int, ranks: Sequence[Sequence[Mapping[str, Any]]]) -> Round:
    """One round of all ranks, by their slowest steps.

    Args:
        index: of the round.
        ranks: of each rank what it tells of each of its steps (`watch.Steps.told`).
    """
    joined: dict[str, Any] = {name: defaultdict(tuple) for name in _JOIN}
    faults: dict[str, str] = {}
    for step in zip(*ranks, strict=True):
        arm = step[0]["arm"]
        for name, join in _JOIN.items():
            values = [of_rank[name] for of_rank in step]
            if None not in values:
                joined[name][arm] += (join(values),)
        for rank, of_rank in enumerate(step):
            if why := of_rank["faults"]:
                faults.setdefault(arm, f"rank {rank}: {why}" if len(ranks) > 1 else why)
    times, losses = joined["times_ms"], joined["losses"]
    joined["losses"] = {arm: seen for arm, seen in losses.items() if len(seen) == len(times[arm])}
    return Round(index, faults=faults, **{name: dict(joined[name]) for name in _JOIN})


def _median(seen: Sequence[tuple[int, float]]) -> float:
    return statistics.median(value for _, value in seen) if seen else math.nan


@cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined).get_template("answer.txt.j2")
