"""TrialResult: what a trial found, the one record of which its words and its rows are views. Pure functions of the rounds."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from harness.machine import hardware, mfu
from harness.store import printer, stats
from harness.store.compare import TIE, judged
from harness.store.errors import UsageError
from harness.store.stats import MIN_ROUNDS, t_interval
from harness.store.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterator


BASE, AGAIN, FP8 = "base", "base:again", "fp8"
ARMS = (BASE, AGAIN, FP8)
_NAMES = {BASE: "bf16", AGAIN: "bf16 again", FP8: "FP8"}
_MOST = 3  # blocks that are named
# Key of `data()`, title and format of a figure of an arm
_COLUMNS = (
    ("step_ms", "ms", ".4g"),
    ("tokens_per_s", "tokens/s a rank", ",.0f"),
    ("mfu_mixed", "mixed MFU", ".1%"),
    ("mfu_bf16_peak", "of the bf16 peak", ".1%"),
    ("joules", "J", ".4g"),
    ("peak_gib", "peak GiB", ".2f"),
)
# What a step is for: `warm` and `lead` are not timed; `compare` and `count` are the two steps of the proof; `none` counts
# the FP8 GEMMs of a bf16 step, of which there must be none.
Purpose = Literal["warm", "compare", "count", "none", "lead", "timed"]
# Each precision runs two untimed steps before it is looked at: the first compiles, the second shows that it is done
_BEFORE: dict[str, tuple[Purpose, ...]] = {
    BASE: ("warm", "warm", "none"),
    FP8: ("warm", "warm", "compare", "count"),
}


@dataclass(frozen=True, slots=True)
class PlannedStep:
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
class TrialPlan:
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
    def preparation(self) -> list[PlannedStep]:
        """The steps before the first block: each precision warms up, then is proved."""
        return [PlannedStep(arm, purpose) for arm, purposes in _BEFORE.items() for purpose in purposes]

    @property
    def rounds(self) -> int:
        """Whole rounds that fit."""
        return (self.steps - len(self.preparation)) // self.per_round

    def turns(self) -> Iterator[PlannedStep]:
        """What each step is for, in order."""
        yield from self.preparation
        for index in range(self.rounds):
            for arm in self.order(index):
                yield from [PlannedStep(arm, "lead", index)] * self.lead
                yield from [PlannedStep(arm, "timed", index)] * self.block

    def order(self, index: int) -> tuple[str, ...]:
        """The arms of a round, in an order drawn for it alone."""
        return tuple(random.Random(f"{self.seed}/{index}").sample(ARMS, len(ARMS)))


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.store.printer import Tone
    from harness.store.stats import Effect

    ByArm = Mapping[str, tuple[float, ...]]

TrialDecision = Literal["on", "off", "cannot tell"]
# How what all ranks have seen of a step becomes one number
_JOIN: dict[str, Callable[[list[float]], float]] = {
    "times_ms": max,
    "gaps_ms": max,
    "losses": statistics.fmean,
    "peak_bytes": max,
    "joules": statistics.fmean,
}


@dataclass(frozen=True, slots=True)
class TrialRound:
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
    rounds: tuple[TrialRound, ...] = ()
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
        return self.control.as_floor

    @property
    def effect(self) -> Effect:
        """FP8 over bf16, paired by round; `speedup` above 1: FP8 is faster."""
        return stats.paired([-r.log_ratio(FP8, BASE) for r in self.rounds if r.has(FP8, BASE)], self.floor)

    def seen(self, name: str, *arms: str) -> list[tuple[int, float]]:
        """(round, value) of what the blocks of these arms that count have under a name of `TrialRound`'s."""
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
        verdict, reason = judged(found)
        if math.isnan(self.floor) or verdict == "unclear" or (verdict == "same" and found.low * TIE < 1):
            return f"{reason}: neither a gain nor a tie is shown; take more steps, or a quieter machine"
        return ""

    @property
    def decision(self) -> TrialDecision:
        """For speed alone: on where FP8 is known to be faster, off where it is known to be slower or shown to be a tie."""
        if self.doubt:
            return "cannot tell"
        return "on" if self.effect.direction == "faster" else "off"

    @property
    def tone(self) -> Tone:
        """Good where FP8 is on, bad where it is off."""
        tones: Mapping[TrialDecision, Tone] = {"on": "good", "off": "bad"}
        return tones.get(self.decision, "")

    @property
    def is_timed(self) -> bool:
        """Whether both precisions have a time that may be reported."""
        return not self.refused and self.median_ms(BASE) > 0 and self.median_ms(FP8) > 0

    @property
    def no_mfu(self) -> str:
        """Why no MFU is stated; "" where it is."""
        name, uses = self.gpu[0] if self.gpu else "the GPU", self.mfu
        mixed = [uses[arm].mfu_mixed if arm in uses else None for arm in (BASE, FP8)]
        if not self.peaks:
            return f"{name} is not in the table of peaks"
        if None in mixed:
            return "the dtype of some product, or its peak, is not known"
        if any(share and share > 1 for share in mixed):
            return (
                f"it would be above the peaks of {name}; time, FLOPs (the masked half of attention is among them) or device "
                "are wrong"
            )
        return ""

    @property
    def no_energy(self) -> str:
        """Why no energy is stated; "" where it is."""
        is_read = {BASE, FP8} <= self.joules.keys()
        return "" if is_read else self.unmetered or "a reading of the counter failed"

    def _repr_html_(self) -> str:
        return str(printer.as_html(self))

    def lines(self) -> list[str]:
        """The answer with how much stands below it, what it rests on, and how the model was left."""
        blocks = [(r.index, _NAMES[arm], why) for r in self.rounds for arm, why in r.faults.items()]
        because = f", because {self.doubt}" if self.doubt else ""
        left_out = f"{plural(len(blocks), 'block')} left out, below" if blocks else ""
        notes = f"{plural(len(self.notes), 'note')} below" if self.notes else ""
        undone = "not all was put back" if self.not_restored else ""
        beside = filter(None, (left_out, notes, undone))
        put_back = "" if self.restored is None else f", and put back were: {', '.join(self.restored)}"
        in_fp8, in_bf16 = self.steps_run
        found = [
            "; ".join([f"for speed: {self.decision}{because}", *beside]),
            *self._figures(),
            self.proof,
            *(f"round {index}, block of {arm} left out: {why}" for index, arm, why in blocks[:_MOST]),
            f"{len(blocks) - _MOST} more blocks were left out" if blocks[_MOST:] else "",
            *self.notes,
            f"{in_fp8 + in_bf16} steps: {in_fp8} in FP8, {in_bf16} in bf16; the model was left in {self.ends_in}{put_back}",
            f"NOT put back: {self.not_restored}" if self.not_restored else "",
        ]
        return [" ".join(line.split()) for line in found if line]

    def _figures(self) -> Iterator[str]:
        """Lines with a figure; none where none may be told."""
        if self.refused:
            return
        effect, what = self.effect, f"FP8 ({self.recipe}) against bf16 in this loop"
        if effect.has_interval:
            floor = f"{self.floor:.3f}x" if self.floor > 0 else "unknown"
            interval = f"{1 / effect.high:.3f} to {1 / effect.low:.3f}"
            yield f"{what}: {effect.speedup:.3f}x ({interval}), {effect.rounds} paired rounds, noise floor {floor}"
        else:
            yield f"{what}: not measured"
        base, fp8, gap = self.median_ms(BASE), self.median_ms(FP8), self.gap_ms
        if self.is_timed and gap >= 0.1 * base:
            rate = (
                f" and comes to {1e3 * self.tokens / (fp8 + gap):,.0f} tokens/s a rank in FP8"
                if self.tokens
                else ""
            )
            waits = (
                ". The loop waits for its loader longer than for the model: mend that first; the ratio is that of the steps "
                "alone"
            )
            yield (
                f"between steps: {gap:.4g} ms (data loader, logging); with it the loop gains {(base + gap) / (fp8 + gap):.3f}x"
                f"{rate}{waits * (gap > base)}"
            )
        if self.is_timed and self.device == "cuda":
            if self.no_energy:
                yield f"energy: not measured: {self.no_energy}"
            if self.no_mfu:
                yield f"MFU: not stated: {self.no_mfu}"
            elif self.gpu and self.peaks:
                dtypes = sorted({dtype for flops in self.flops.values() for dtype, n in flops.items() if n})
                peaks = ", ".join(f"{dtype} {self.peaks.peak_tflops(dtype):.4g}" for dtype in dtypes)
                yield f"mixed MFU: each dtype by its own peak ({self.gpu[0]}: {peaks} TFLOP/s)"
        if gaps := self.loss_gap:
            mean, low, high = gaps
            yield (
                f"loss of FP8's blocks: {mean:+.2%} ({low:+.2%} to {high:+.2%}) of bf16's; blocks share one model, so this cannot "
                "say how FP8 trains: sweep=divergence does"
            )

    def tables(self) -> list[printer.Table]:
        """Figures of a step of each arm; none where none is known or may be told."""
        board, shown = "a GPU" if self.ranks > 1 else "the whole board", self.data()["arms"]
        rows = [
            [_NAMES[arm], *(_shown(figures[name], spec) for name, _, spec in _COLUMNS)]
            for arm, figures in shown.items()
        ]
        slowest = f", the slowest of {self.ranks} ranks" if self.ranks > 1 else ""
        energy = "" if self.no_energy else f"; joules of {board}, with what runs between steps"
        columns = ["arm", *(f">{title}" for _, title, _ in _COLUMNS)]
        found = printer.filled(printer.table(f"A step{slowest}{energy}", columns, rows))
        return [found] if len(found.columns) > 1 else []

    def data(self) -> dict[str, Any]:
        """Plain values; of what is not known, or may not be told, None."""
        figures: dict[str, Any] = dict.fromkeys(("speedup", "low", "high", "floor", "loss_gap"))
        effect, arms = self.effect, {arm: dict.fromkeys(name for name, *_ in _COLUMNS) for arm in (BASE, FP8)}
        if not self.refused:
            figures |= {"floor": self.floor, "loss_gap": self.loss_gap}
            arms = {arm: self._of(arm) for arm in arms}
            if effect.has_interval:
                figures |= {"speedup": effect.speedup, "low": 1 / effect.high, "high": 1 / effect.low}
        names = "recipe device decision doubt ranks proof proved notes restored not_restored ends_in"
        return printer.picked(self, names) | figures | {"rounds": effect.rounds, "arms": arms}

    def _of(self, arm: str) -> dict[str, float | None]:
        """Figures of an arm by the names of `_COLUMNS`."""
        ms, peak = self.median_ms(arm), self.peak_bytes.get(arm)
        use = None if self.no_mfu else self.mfu[arm]
        return {
            "step_ms": ms,
            "tokens_per_s": 1e3 * self.tokens / ms if self.tokens and ms > 0 else None,
            "mfu_mixed": use.mfu_mixed if use else None,
            "mfu_bf16_peak": use.mfu_bf16_peak if use else None,
            "joules": None if self.no_energy else statistics.fmean(j for _, j in self.joules[arm]),
            "peak_gib": peak and peak / 2**30,
        }


def _shown(value: float | None, spec: str) -> str:
    return format(value, spec) if value is not None and value > 0 else ""


def merged(index: int, ranks: Sequence[Sequence[Mapping[str, Any]]]) -> TrialRound:
    """One round of all ranks, by their slowest steps.

    Args:
        index: of the round.
        ranks: of each rank what it tells of each of its steps (`watch.RoundSteps.records`).
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
    return TrialRound(index, faults=faults, **{name: dict(joined[name]) for name in _JOIN})


def _median(seen: Sequence[tuple[int, float]]) -> float:
    return statistics.median(value for _, value in seen) if seen else math.nan
