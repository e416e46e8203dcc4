"""How a time is measured, as data: the settings of the timing engine, and what it says of one arm."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from harness.store.errors import Cause

if TYPE_CHECKING:
    from harness.timing.timers import L2State

# Below it a single pair of events, which tell 0.5 us, is off by more than 1 %.
SHORT_MS = 0.05

Regime = Literal["isolated", "sustained"]
WarmupRule = Literal["clock_stable", "no_clock", "time_cap", "lead_in"]
StopReason = Literal["converged", "time_cap", "sample_cap", "throttled", "under_way"]


@dataclass(frozen=True)
class TimingConfig:
    """How long to measure. Seconds are wall-clock; the defaults suit one GPU kernel.

    Attributes:
        min_rounds: rounds before the stop rule is asked; below 8 a t interval says little.
        max_rounds: cap on rounds; up to 40 the sign-flip test counts every pattern.
        min_samples: samples an arm needs before it may stop.
        min_seconds: time an arm must have been measured before it may stop.
        max_seconds: time cap per arm; a case of A arms ends in the round in which A times this is spent.
        rel_half_width: an arm has converged when the 95 % t interval of its round medians (on logs) is
            narrower than this share to either side.
        block_ms: target length of one arm's block in a round; short against clock drift, long against the
            cost of switching arms.
        max_block_samples: cap on samples in a block. With `max_rounds` it bounds what a row stores.
        warmup_min_iterations: calls of each arm before the first sample.
        warmup_min_seconds: steady load before the first sample, all arms of the case together, since the
            clock belongs to the device and not to an arm.
        warmup_max_seconds: cap on the warm-up of a case.
        clock_window: SM-clock readings that must agree before the clock counts as stable.
        clock_tolerance: their relative range, at most.
        sustained_seconds: timed load per arm in the sustained regime, spread over its rounds.
        sustained_rounds: rounds of the sustained regime; at least 4, to have intervals at all.
        sustained_lead_seconds: untimed load at the head of each sustained run. Power control settles in
            some tens of milliseconds after the arm changes.
        sustained_max_cases: cases per sweep that are measured so (the executor picks the largest).
        pause_s: seconds for which the device rests before each step of a resident arm, else before each block: it runs in
            bursts, below a power cap that it meets when it works without a rest. Energy is then not read.
        checkpoint_s: seconds between two snapshots of the rounds finished so far; 0 makes one after every round.
    """

    min_rounds: int = 8
    max_rounds: int = 40
    min_samples: int = 30
    min_seconds: float = 0.25
    max_seconds: float = 5.0
    rel_half_width: float = 0.005
    block_ms: float = 20.0
    max_block_samples: int = 100
    warmup_min_iterations: int = 3
    warmup_min_seconds: float = 0.5
    warmup_max_seconds: float = 5.0
    clock_window: int = 10
    clock_tolerance: float = 0.02
    sustained_seconds: float = 2.0
    sustained_rounds: int = 4
    sustained_lead_seconds: float = 0.2
    sustained_max_cases: int = 6
    pause_s: float = 0.0
    checkpoint_s: float = 1.0

    def __post_init__(self) -> None:
        at_least = {
            **dict.fromkeys(("min_rounds", "max_rounds", "min_samples", "max_block_samples"), 1),
            **dict.fromkeys(("warmup_min_iterations", "sustained_rounds"), 1),
            "clock_window": 2,
        }
        positive = (
            "max_seconds",
            "rel_half_width",
            "warmup_max_seconds",
            "clock_tolerance",
            "sustained_seconds",
        )
        for f in fields(self):
            value = getattr(self, f.name)
            if not math.isfinite(value) or value < at_least.get(f.name, 0):
                raise ValueError(
                    f"timing.{f.name}={value}: must be finite and at least {at_least.get(f.name, 0)}"
                )
            if f.name in positive and value == 0:
                raise ValueError(f"timing.{f.name}=0: must be above 0")
        for low, high in (
            ("min_rounds", "max_rounds"),
            ("min_seconds", "max_seconds"),
            ("warmup_min_seconds", "warmup_max_seconds"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"timing.{low}={getattr(self, low)} is above timing.{high}={getattr(self, high)}"
                )


@dataclass(frozen=True)
class Timing:
    """What was measured of one arm, and how. With a `failure` there are no samples.

    Attributes:
        samples_ms: ms per call, in the order taken.
        rounds: round of each sample.
        sample_clock_mhz: SM clock while each sample's block ran; NaN where one reading failed, empty where
            none worked.
        joules: energy of the whole board for one call, by round; NaN where one reading failed or the block was too
            short for the meter, empty where no reading worked.
        calls_per_sample: calls that one sample spans (it holds their mean).
        late_samples: samples whose work was not wholly queued when the device reached it (CUDA only).
        rel_half_width: what the stop rule saw at the end; None below two rounds.
        throttled_rounds: rounds in which a throttle reason was read; their samples are kept.
        resolution_ms: smallest difference between two samples that the timer tells, by call.
        hold: what kept the device from work that was not queued yet (`harness.timing.timers`); "" where nothing did.
        short: why samples shorter than `SHORT_MS` are single calls all the same; "" where they are not.
        split_ms: of each sample, ms up to the point that the closure marks; empty where it marks none.
        contended: another process computed on the device before, after or between two rounds; None where it can't be known.
        contended_rounds: in which an arm waited for a core, or another process computed on the device.
        pause_s: for which the device rested before each block, or each step of a resident arm.
        stopped_rounds: how many were dropped since a process did not run meanwhile (SIGSTOP, Ctrl-Z).
        cause: of the failure.
    """

    samples_ms: tuple[float, ...]
    rounds: tuple[int, ...]
    sample_clock_mhz: tuple[float, ...]
    regime: Regime
    method: str
    l2: L2State
    warmup_iterations: int
    warmup_seconds: float
    warmup_rule: WarmupRule
    stop_reason: StopReason
    throttled: bool
    contended: bool | None
    calls_per_sample: int = 1
    late_samples: int = 0
    seconds: float = 0.0
    rel_half_width: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    throttled_rounds: tuple[int, ...] = ()
    failure: str = ""
    joules: tuple[float, ...] = ()
    resolution_ms: float = 0.0
    hold: str = ""
    short: str = ""
    split_ms: tuple[float, ...] = ()
    cause: Cause = Cause.NONE
    contended_rounds: tuple[int, ...] = ()
    stopped_rounds: int = 0
    pause_s: float = 0.0

    def as_json_dict(self) -> dict[str, object]:
        """The store's `timing` column: all that has no column or row of its own."""
        own_column = {"samples_ms", "rounds", "sample_clock_mhz", "regime", "failure", "cause", "joules"}
        own_column.add("split_ms")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own_column}
