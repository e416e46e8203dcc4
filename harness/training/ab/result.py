"""TrialResult: what a trial found, as data and in words. Pure functions of the rounds; no torch."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from harness.store import effect
from harness.store.compare import TIE
from harness.store.stats import t_interval
from harness.training.ab import words
from harness.training.ab.plan import AGAIN, ARMS, BASE, FP8, WITH_GATHER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.store.effect import Effect

Decision = Literal["on", "off", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Round:
    """One round, of all ranks.

    Attributes:
        times_ms: of each arm the timed steps; of each step the slowest rank's.
        gaps_ms: of each arm the time between its steps, the longest of all ranks.
        losses: of each arm the mean over ranks of each step's loss; empty where none was seen.
        faults: arm -> why its block counts for nothing.
    """

    index: int
    times_ms: Mapping[str, tuple[float, ...]]
    gaps_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)

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
        arms: that each round had a block of.
        proof: line of the proof; "" where it did not come so far.
        gather_proof: that of the arm with FP8 all-gather, where it is an arm of its own.
        proved: FP8 was proved on every rank, and bf16 steps ran none.
        problem: why the trial gives no answer at all; "" if it may.
        tokens: of a step of one rank; None where that is not known.
        under_way: rounds are still to come; nothing is decided before.
        flops: of the model in a step of one rank, by the dtype that each product ran in, for "base" and each FP8 arm.
        peak_bytes: most memory of a timed step, by arm; empty where the device keeps none.
        joules: (round, joules of a step with what runs between steps, a mean of all ranks' boards) of each block, by arm;
            empty where none was measured.
        unmetered: why no energy was measured, where none was.
        gpu: name and memory in GiB of the GPU; None on another device.
        slow_rank: "rank 1 takes about 21 % longer ..."; "" if none stands out.
        steps_run: steps taken in FP8 and in bf16, warm-up included.
        ends_in: precision in which the model was left.
        restored: names of what was put back; None where nothing was asked for or it is not put back.
        not_restored: why what was to be put back is not; "" if it is, or nothing was asked for.
        notes: what could not be watched.
        layers: FP8 layers of the model.
        facts: of the proofs, by FP8 arm, for the store.
    """

    recipe: str
    device: str
    rounds: tuple[Round, ...]
    method: str
    ranks: int = 1
    arms: tuple[str, ...] = ARMS
    proof: str = ""
    gather_proof: str = ""
    proved: bool = False
    problem: str = ""
    tokens: float | None = None
    under_way: bool = False
    flops: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    joules: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    unmetered: str = ""
    gpu: tuple[str, float] | None = None
    slow_rank: str = ""
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
    def floor(self) -> float:
        """A/A noise floor: how far two blocks in bf16 may seem apart, as a ratio >= 1; NaN below the least rounds."""
        logs = [r.log_ratio(BASE, AGAIN) for r in self.rounds if r.has(BASE, AGAIN)]
        control = effect.paired(logs)
        if not control.has_interval:
            return math.nan
        return math.exp(max(abs(control.log_low), abs(control.log_high)))

    @property
    def effect(self) -> Effect:
        """FP8 over bf16, paired by round; `speedup` above 1: FP8 is faster."""
        return self.between(FP8, BASE)

    def between(self, arm: str, other: str) -> Effect:
        """One arm over another, paired by round; `speedup` above 1: `arm` is faster."""
        logs = [-r.log_ratio(arm, other) for r in self.rounds if r.has(arm, other)]
        return effect.paired(logs, self.floor)

    @property
    def control(self) -> Effect:
        """The A/A control: bf16 against bf16."""
        return effect.paired([r.log_ratio(BASE, AGAIN) for r in self.rounds if r.has(BASE, AGAIN)])

    def median_ms(self, arm: str) -> float:
        """Median step of an arm; NaN without one."""
        times = [t for r in self.rounds if r.has(arm) for t in r.times_ms[arm]]
        return statistics.median(times) if times else math.nan

    @property
    def gap_ms(self) -> float:
        """Median time between steps: data loader and whatever else runs outside of `step()`; NaN without one."""
        gaps = [g for r in self.rounds for arm in self.arms if r.has(arm) for g in r.gaps_ms.get(arm, ())]
        return statistics.median(gaps) if gaps else math.nan

    @property
    def loss_gap(self) -> tuple[float, float, float] | None:
        """Relative loss gap of FP8's blocks, mean and 95 % interval over rounds; None where no loss was seen."""
        gaps = [
            statistics.fmean(r.losses[FP8]) / statistics.fmean(r.losses[BASE]) - 1
            for r in self.rounds
            if r.has(BASE, FP8)
            and r.losses.get(FP8)
            and r.losses.get(BASE)
            and statistics.fmean(r.losses[BASE])
        ]
        if len(gaps) < effect.MIN_ROUNDS or not all(map(math.isfinite, gaps)):
            return None
        return (statistics.fmean(gaps), *t_interval(gaps))

    @property
    def doubt(self) -> str:
        """Why nothing can be decided of FP8 against bf16; "" where the times decide."""
        return self.doubt_of(FP8, BASE)

    def doubt_of(self, arm: str, other: str) -> str:
        """Why nothing can be decided of an arm against another; "" where the times decide."""
        found = self.between(arm, other)
        if self.problem:
            return self.problem
        if self.under_way:
            return (
                "the trial is under way; on several ranks call trial.close() on all of them to end it early"
            )
        if self.refused:
            return self.refused
        if not found.has_interval:
            faults = {fault for r in self.rounds for fault in r.faults.values()}
            why = f" ({'; '.join(sorted(faults))})" if faults else ""
            return f"{found.rounds} rounds count{why}; an interval needs {effect.MIN_ROUNDS}"
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
        return self.decision_of(FP8, BASE)

    def decision_of(self, arm: str, other: str) -> Decision:
        """The same of one arm against another."""
        if self.doubt_of(arm, other):
            return "cannot tell"
        return "on" if self.between(arm, other).direction == "faster" else "off"

    def lines(self) -> list[str]:
        """The answer, in at most 20 lines."""
        return words.lines(self)


def merged(index: int, messages: Sequence[Mapping[str, Any]]) -> Round:
    """One round of all ranks: of each step the slowest rank's time, of each block any rank's fault."""
    arms = [arm for arm in WITH_GATHER if all(arm in m["times_ms"] for m in messages)]

    def slowest(key: str) -> dict[str, tuple[float, ...]]:
        return {
            a: tuple(max(column) for column in zip(*(m[key][a] for m in messages), strict=True)) for a in arms
        }

    faults: dict[str, str] = {}
    for rank, message in enumerate(messages):
        for arm, why in message["faults"].items():
            faults.setdefault(arm, f"rank {rank}: {why}" if len(messages) > 1 else why)
    losses = {
        a: tuple(statistics.fmean(column) for column in zip(*(m["losses"][a] for m in messages), strict=True))
        for a in arms
        if all(len(m["losses"].get(a, ())) == len(m["times_ms"][a]) for m in messages)
    }
    return Round(index, slowest("times_ms"), slowest("gaps_ms"), losses, faults)
