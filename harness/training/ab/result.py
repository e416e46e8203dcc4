"""TrialResult: what a trial found, as data and in words. Pure functions of the rounds; no torch."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from harness.store import effect
from harness.store.compare import TIE
from harness.store.stats import t_interval
from harness.training.ab.plan import AGAIN, BASE, FP8

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.store.effect import Effect

Decision = Literal["on", "off", "cannot tell"]
_WAITS = 0.1  # a loader that takes this share of a step is told


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
        proof: line of the proof; "" where it did not come so far.
        proved: FP8 was proved on every rank, and bf16 steps ran none.
        problem: why the trial gives no answer at all; "" if it may.
        tokens: of a step of one rank; None where that is not known.
        under_way: rounds are still to come; nothing is decided before.
        flops: of a step of one rank, by the dtype that each product ran in, for "base" and "fp8".
        peak_bytes: most memory of a timed step, by arm; empty where the device keeps none.
        slow_rank: "rank 1: 21 % slower than the median rank"; "" if none stands out.
        steps_run: steps taken in FP8 and in bf16, warm-up included.
        ends_in: precision in which the model was left.
        restored: names of what was put back; None where nothing was asked for or it is not put back.
        not_restored: why what was to be put back is not; "" if it is, or nothing was asked for.
        notes: what could not be watched.
        layers: FP8 layers of the model.
        facts: more, for the store.
    """

    recipe: str
    device: str
    rounds: tuple[Round, ...]
    method: str
    ranks: int = 1
    proof: str = ""
    proved: bool = False
    problem: str = ""
    tokens: float | None = None
    under_way: bool = False
    flops: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    slow_rank: str = ""
    steps_run: tuple[int, int] = (0, 0)
    ends_in: str = "bf16"
    restored: tuple[str, ...] | None = None
    not_restored: str = ""
    notes: tuple[str, ...] = ()
    layers: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

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
        logs = [-r.log_ratio(FP8, BASE) for r in self.rounds if r.has(BASE, FP8)]
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
        gaps = [
            g for r in self.rounds for arm in (BASE, AGAIN, FP8) if r.has(arm) for g in r.gaps_ms.get(arm, ())
        ]
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
        """Why nothing can be decided; "" where the times decide."""
        found = self.effect
        if self.problem:
            return self.problem
        if self.under_way:
            return (
                "the trial is under way; on several ranks call trial.close() on all of them to end it early"
            )
        if not self.proved:
            return f"FP8 is not proved: {self.proof or 'the steps of the proof were not reached'}"
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
        if self.doubt:
            return "cannot tell"
        return "on" if self.effect.direction == "faster" else "off"

    def lines(self) -> list[str]:
        """The answer, in at most 20 lines."""
        found, out = self.effect, []
        if found.has_interval:
            floor = "unknown" if math.isnan(self.floor) else f"{self.floor:.3f}x"
            out.append(
                f"FP8 ({self.recipe}) against bf16 in this loop: {found.speedup:.3f}x "
                f"({math.exp(-found.log_high):.3f} to {math.exp(-found.log_low):.3f}), {found.rounds} paired rounds, "
                f"noise floor {floor}"
            )
        else:
            out.append(f"FP8 ({self.recipe}) against bf16 in this loop: not measured")
        doubt = self.doubt
        out.append(f"for speed: {self.decision}" + (f", because {doubt}" if doubt else ""))
        base, fp8 = self.median_ms(BASE), self.median_ms(FP8)
        if not math.isnan(base) and not math.isnan(fp8):
            line = f"step: {base:.4g} ms in bf16, {fp8:.4g} ms in FP8"
            if self.tokens:
                line += (
                    f"; {1e3 * self.tokens / base:,.0f} and {1e3 * self.tokens / fp8:,.0f} tokens/s a rank"
                )
            if self.ranks > 1:
                line += f"; the slowest of {self.ranks} ranks"
            out.append(line)
            out += self._between(base, fp8)
        if self.slow_rank:
            out.append(self.slow_rank)
        if self.peak_bytes:
            named = {BASE: "bf16", FP8: "FP8"}
            out.append(
                "peak memory: "
                + ", ".join(
                    f"{named[a]} {b / 2**30:.2f} GiB" for a, b in self.peak_bytes.items() if a in named
                )
            )
        if self.proof:
            out.append(self.proof)
        lost = [(r.index, arm, why) for r in self.rounds for arm, why in r.faults.items()]
        out += [f"round {index}, block of {arm} left out: {why}" for index, arm, why in lost[:3]]
        if len(lost) > 3:
            out.append(f"{len(lost) - 3} more blocks were left out")
        gap = self.loss_gap
        if gap is not None:
            out.append(
                f"loss of FP8's blocks: {gap[0]:+.2%} ({gap[1]:+.2%} to {gap[2]:+.2%}) of bf16's; blocks share one model, so this "
                "cannot say how FP8 trains: sweep=divergence does"
            )
        in_fp8, in_bf16 = self.steps_run
        end = f"{in_fp8 + in_bf16} steps: {in_fp8} in FP8, {in_bf16} in bf16; the model was left in {self.ends_in}"
        if self.restored is not None:
            end += f", and put back were: {', '.join(self.restored)}"
        if self.not_restored:
            end += f". NOT put back: {self.not_restored}"
        return [*out, *self.notes, end]

    def _between(self, base: float, fp8: float) -> list[str]:
        """What runs between the steps, where it matters."""
        gap = self.gap_ms
        if math.isnan(gap) or gap < _WAITS * base:
            return []
        line = f"between steps: {gap:.4g} ms (data loader, logging); with it the loop gains {(base + gap) / (fp8 + gap):.3f}x"
        if gap > base:
            line += ". The loop waits for its loader longer than for the model: mend that first"
        return [line]


def merged(index: int, messages: Sequence[Mapping[str, Any]]) -> Round:
    """One round of all ranks: of each step the slowest rank's time, of each block any rank's fault."""
    arms = [arm for arm in (BASE, AGAIN, FP8) if all(arm in m["times_ms"] for m in messages)]

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
