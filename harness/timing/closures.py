"""`harness.measure`: two or more closures against each other, with the engine that times every sweep.

found = harness.measure({"mm": lambda: a @ b, "addmm": lambda: torch.addmm(c, a, b)}, check=torch.allclose)
found["addmm"].speedup, found.floor, found.to_frame()
"""

from __future__ import annotations

import copy
import html
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from harness.machine.environment import device_kind
from harness.machine.gpu_monitor import monitor_for
from harness.store import stats
from harness.store.case import Arm, control_name
from harness.store.compare import pairs_of
from harness.store.errors import UsageError, one_line
from harness.store.printer import picked
from harness.store.stats import median, paired_log_ratios
from harness.timing.config import Timing, TimingConfig
from harness.timing.rounds import measure as measure_rounds
from harness.timing.timers import timer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pandas as pd

    from harness.store.stats import Effect
    from harness.timing.timers import Timer


@dataclass(frozen=True)
class Compared:
    """What was measured; `found[name]` is the effect of a closure against the first one.

    Attributes:
        first: name of the closure that the others are compared with.
        timings: name -> samples in ms with their rounds, the first one's second copy left out.
        again: that second copy, the A/A control.
        wrong: name -> why its result is not the first one's; such a closure has no ratio.
        device: where it was timed.
    """

    first: str
    timings: Mapping[str, Timing]
    again: Timing
    wrong: Mapping[str, str]
    device: str

    @property
    def floor(self) -> float:
        """How far two copies of the first one seem apart, as a ratio >= 1; NaN where it is not known."""
        floor: float = next(iter(self._pairs.values()))["floor"]
        return floor

    @cached_property
    def _pairs(self) -> dict[str, dict[str, Any]]:
        """Each other closure against the first one, judged as the arms of a sweep are."""
        every = {**self.timings, control_name(self.first): self.again}
        rows = [self._record(name, timing) for name, timing in every.items()]
        return {pair["arm"]: pair for pair in pairs_of(rows)}

    def _record(self, name: str, timing: Timing) -> dict[str, Any]:
        """A closure's time with the columns that `pairs_of` reads."""
        is_ok = not timing.failure
        return {
            **dict.fromkeys(("run_id", "case_id", "env_id"), ""),
            **dict.fromkeys(("axes", "flops", "resolved"), "{}"),
            "arm": name,
            "arm_fields": Arm(variant=self.first, control=name not in self.timings).as_json,
            "baseline": "" if name == self.first else self.first,
            "metric": "time_ms",
            "regime": timing.regime if is_ok else "",
            "status": "ok" if is_ok else "failed",
            "reason": timing.failure,
            "samples": timing.samples_ms,
            "rounds": timing.rounds,
            "value": median(timing.samples_ms) if is_ok else math.nan,
            "sample_clock_mhz": timing.sample_clock_mhz,
            "timing": json.dumps(picked(timing, "method l2 throttled contended")),
        }

    def __getitem__(self, name: str) -> Effect:
        """The effect of a closure against the first one, paired by round; its `speedup` above 1: it is faster.

        Raises:
            KeyError: no such closure.
            ValueError: it has no ratio: it failed, or its result is wrong.
        """
        why = self.wrong.get(name) or self.timings[name].failure or self.timings[self.first].failure
        if why:
            raise ValueError(f"{name} has no ratio: {why}")
        mine, base = self.timings[name], self.timings[self.first]
        logs = paired_log_ratios(base.samples_ms, base.rounds, mine.samples_ms, mine.rounds)
        return stats.paired(logs, self.floor)

    def __iter__(self) -> Iterator[str]:
        return iter(self.timings)

    def to_frame(self) -> pd.DataFrame:
        """One row a closure: median_ms, speedup, low, high (95 %), rounds, verdict, reason; what has no ratio has NaN."""
        import pandas as pd

        return pd.DataFrame([self._row(name) for name in self]).set_index("name")

    def _row(self, name: str) -> dict[str, Any]:
        timing = self.timings[name]
        row: dict[str, Any] = {
            "name": name,
            "median_ms": median(timing.samples_ms) if timing.samples_ms else math.nan,
            **dict.fromkeys(("speedup", "low", "high"), math.nan),
            "rounds": 0,
            **dict.fromkeys(("verdict", "reason"), ""),
        }
        if name == self.first and not timing.failure:
            return row | {"rounds": len(set(timing.rounds)), "reason": "what the others are compared with"}
        try:
            found = self[name]
        except ValueError as error:
            return row | {"verdict": "refused", "reason": str(error)}
        judged = ("low", "high", "verdict", "reason")
        return row | picked(found, "speedup rounds") | {key: self._pairs[name][key] for key in judged}

    def __str__(self) -> str:
        return self.to_frame().to_string(float_format=lambda x: f"{x:.4g}", na_rep="")

    def _repr_html_(self) -> str:
        table: str = self.to_frame().to_html(float_format=lambda x: f"{x:.4g}", na_rep="")
        return f"{table}<p>on {html.escape(self.device)}, paired by round, 95 % intervals</p>"


def measure(
    closures: Mapping[str, Callable[[], object]],
    *,
    check: Callable[[Any, Any], object] | None = None,
    rounds: int | None = None,
    device: str = "auto",
    seed: int = 0,
    timing: TimingConfig | None = None,
    timer: Timer | None = None,
) -> Compared:
    """Times closures in rounds, interleaved in random order, the first one twice: how far its copies seem apart is the floor.

    Args:
        closures: name -> function without arguments, two or more. The first is what the others are compared with.
        check: check(result of the first, result of another) before anything is timed; what is false, or raises, leaves
            that closure without a ratio. None: results are not compared.
        rounds: exactly so many; None: until the intervals are narrow, as in a sweep.
        device: "cpu", "cuda", or "auto": a GPU if there is one.
        seed: of the order.
        timing: how long to warm up and to measure.
        timer: of the device; by default the one of sweeps.

    Returns:
        Compared.

    Raises:
        UsageError: fewer than two closures, rounds too few for an interval, or no such device.
    """
    if len(closures) < 2 or not all(callable(fn) for fn in closures.values()):
        raise UsageError(f"closures={list(closures)}: expected two functions or more, by name")
    if rounds is not None and (
        isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < stats.MIN_ROUNDS
    ):
        raise UsageError(f"rounds={rounds!r}: an interval needs an integer of at least {stats.MIN_ROUNDS}")
    config = timing if timing is not None else TimingConfig()
    if rounds is not None:
        config = replace(config, min_rounds=rounds, max_rounds=rounds, max_seconds=1e9)
    first, device = next(iter(closures)), device_kind(device)
    wrong = _wrong(closures, first, check) if check is not None else {}
    arms = {**closures, control_name(first): closures[first]}
    with monitor_for(device) as monitor:
        found = measure_rounds(arms, timer or timer_for(device), config, seed, monitor)
    again = found.pop(control_name(first))
    return Compared(first, found, again, wrong, device)


def _wrong(
    closures: Mapping[str, Callable[[], object]], first: str, check: Callable[[Any, Any], object]
) -> dict[str, str]:
    """Why each other closure's result is not the first one's."""
    found: dict[str, str] = {}
    try:
        # A copy: another closure may write its result into the same memory
        expected = copy.deepcopy(closures[first]())
    except Exception as error:  # noqa: BLE001 - anyone's closure
        return {name: f"{first} raised {one_line(error)}" for name in closures if name != first}
    for name, fn in closures.items():
        if name == first:
            continue
        try:
            if not check(expected, fn()):
                found[name] = f"its result is not that of {first}"
        except Exception as error:  # noqa: BLE001 - anyone's closure and check
            found[name] = f"its check raised {one_line(error)}"
    return found
