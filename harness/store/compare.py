"""Compare an arm with its baseline, and the difference with the noise.

Only arms of the same case, run and regime are compared, round by round: the arms of a case were measured
interleaved, so a drift of the machine hits both sides of a round and cancels in the ratio. A *speedup* is
`baseline time / arm time` everywhere: above 1 the arm is faster.

A case carries its own noise floors. Each baseline is timed twice a round; how far the second copy (arm
`<baseline>:again`, see `harness.store.case`) seems to be from the first is how far two equal things can seem apart here.

pandas is imported on use: it starts a thread, and suites import this page in the server that workers are forked from.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from harness.store import measurement, stats
from harness.store.case import arm_of, controls
from harness.store.differences import IDENTITY, differences, in_words
from harness.store.outside import parse
from harness.store.rows import rows_of
from harness.store.stats import MIN_ROUNDS, Effect

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import pandas as pd

TIMES = measurement.TIMES
SECONDS = {"ms": 1e-3, "us": 1e-6, "s": 1.0}

# Where two copies of the same arm seem further apart than this, a difference that hides below the floor is
# no tie: the machine is too noisy to say. A noisy machine says "unclear", not "same".
LOUD_FLOOR = 1.10
# What may be said of the conditions of a ratio. Throttling of both sides is what products limited by power do.
BESIDE, ONE_SIDE, BOTH_SIDES = "beside another process", "one side throttled", "both sides throttled"
OTHER_CLOCKS, ONE_TICK, DISAGREE = (
    "clocks differ",
    "the clock is too coarse",
    "runs of the same code disagree",
)
NO_FP8 = "no FP8 layer"  # of a recipe's arm: two equal steps, whose ratio is noise
METHODS = "timed by different methods"
APART = (METHODS, BESIDE, ONE_SIDE, ONE_TICK)  # of two runs
DISTURBED = (NO_FP8, BESIDE, ONE_SIDE, OTHER_CLOCKS, ONE_TICK, DISAGREE)  # such a ratio decides nothing
CLOCKS_APART = 1.05  # medians of two sides, beyond which an unthrottled clock alone may make the difference
# A tie is claimed only where the whole interval lies this close to 1, or within the floor if that is wider.
TIE = 1.03

MODES = ("eager", "compile")
FP8_DTYPES = ("e4m3", "e5m2")

_COLUMNS = [
    *(
        "run_id",
        "sweep",
        "suite",
        "case_id",
        "axes",
        "seed",
        "env_id",
        "arm",
        "arm_fields",
        "baseline",
        "baseline_fields",
        "regime",
        "metric",
        "unit",
    ),
    *("baseline_value", "value", "speedup", "low", "high", "rounds", "floor", "fp8", "verdict", "reason"),
    *("status", "why_not", "cut_off", "condition", "clock_mhz", "baseline_clock_mhz"),
]


def pairs_of(times: Sequence[dict[str, Any]], partial: bool = False) -> list[dict[str, Any]]:
    """How each arm compares with the baseline that its suite declares for it.

    Args:
        times: rows of times as `rows_of` gives them.
        partial: also pair the finished rounds of cases that were cut off; their verdict is "unclear" and the reason
            says so. By default they are missing.

    Returns:
        A record for each (run, case, arm, regime, time metric), A/A controls left out:

        - `arm_fields`, `baseline_fields`: both arms as records (`harness.store.case`);
        - `baseline_value`, `value`: medians of all samples, in `unit`;
        - `speedup`: exp of the mean over rounds of log(baseline median / arm median); above 1 = arm is faster;
          of training steps with different numbers of tokens, by the token;
        - `low`, `high`: 95 % t interval of it over rounds (NaN below `MIN_ROUNDS` rounds);
        - `rounds`: number of rounds in which both were timed;
        - `floor`: A/A noise floor of the baseline as a ratio >= 1 (1.02 = two equal arms may seem 2 % apart): the
          far end of its control's own interval; NaN where the control is missing;
        - `fp8`: the arm spent FLOPs in FP8 and its baseline did not;
        - `verdict`: faster, slower, same, unclear or missing, and `reason` in words;
        - `status`: of the arm's own row, and `why_not` in its words, "" where it has a time;
        - `cut_off`: the case came to no end, and what is paired are its finished rounds;
        - `condition`: of `DISTURBED` ("unclear", but for what is slower all the more), `BOTH_SIDES` or "";
        - `clock_mhz`, `baseline_clock_mhz`: medians of the SM clock over the samples.

        Figures are NaN where there is nothing to compare.
    """
    cases = _cases(times, partial)
    grouped = [group for rows in cases.values() for group in _by_regime(rows)]
    pairs: list[tuple[_Row, _Row | None, str, float]] = []
    for (regime, arms), floors in zip(grouped, _noise_floors([arms for _, arms in grouped]), strict=True):
        # A run whose first baseline alone has a control: its floor stands for the case.
        floor = max(floors.values(), default=math.nan)
        pairs += [
            (arm, arms.get(arm.baseline), regime, floors.get(arm.baseline, floor))
            for arm in arms.values()
            if arm.baseline and not arm.is_control
        ]
    logs = [
        [-log for log in base.log_ratios(arm)] if base is not None and base.ok and arm.ok else []
        for arm, base, *_ in pairs
    ]
    found = stats.all_paired(logs, [floor for *_, floor in pairs])
    return [
        _compare(arm, base, regime, each) for (arm, base, regime, _), each in zip(pairs, found, strict=True)
    ]


def paired_ratios(
    frame: pd.DataFrame, *, partial: bool = False, metrics: Collection[str] = TIMES
) -> pd.DataFrame:
    """`pairs_of` the rows of these metrics in a frame as read by `harness.store.read`, as a frame."""
    import pandas as pd

    times = rows_of(frame[frame["metric"].isin(list(metrics))])
    return pd.DataFrame(pairs_of(times, partial), columns=_COLUMNS)


def against(
    frame: pd.DataFrame, arm: str, other: str, *, partial: bool = False, metrics: Collection[str] = TIMES
) -> pd.DataFrame:
    """`paired_ratios` of one arm against another one that its suite does not declare: both were timed in the same rounds."""
    baseline = frame["baseline"].where(frame["arm"] != arm, other)
    ratios = paired_ratios(frame.assign(baseline=baseline), partial=partial, metrics=metrics)
    return ratios[ratios["arm"] == arm]


def noise_floors(frame: pd.DataFrame) -> dict[str, float]:
    """The noise floor of each case that has an A/A control, as a ratio >= 1: the widest of its baselines and regimes."""
    times = frame[frame["metric"].isin(TIMES)]
    with_control = times["case_id"].isin(times.loc[controls(times), "case_id"])
    cases = _cases(rows_of(times[with_control]))
    found: dict[str, float] = {}
    groups = [(case_id, arms) for (_, case_id, _), rows in cases.items() for _, arms in _by_regime(rows)]
    for (case_id, _), floors in zip(groups, _noise_floors([arms for _, arms in groups]), strict=True):
        for floor in floors.values():
            found[case_id] = max(floor, found.get(case_id, 1.0))
    return found


def with_rates(frame: pd.DataFrame) -> pd.DataFrame:
    """Adds what follows from a time and the work declared for it.

    `tflops` = FLOPs of all dtypes / time (1e12 a second); `gb_per_s` = bytes moved / time (1e9 a second). NaN where
    the work was not declared or the arm has no time.
    """
    seconds = frame["value"] * frame["unit"].map(SECONDS).astype(float)
    seconds = seconds.where(frame["metric"].isin(TIMES) & (frame["status"] == "ok"))
    work = (
        frame["flops"]
        .map({text: sum(parse(text).values()) for text in frame["flops"].unique()})
        .astype(float)
    )
    return frame.assign(
        tflops=(work / seconds / 1e12).where(work > 0), gb_per_s=frame["bytes_moved"] / seconds / 1e9
    )


def _cases(times: Sequence[dict[str, Any]], partial: bool = False) -> dict[tuple[str, str, str], list[_Row]]:
    """Rows of times by (run, case, metric), the samples of all of them gathered by round at once."""
    # Grouped here and not by pandas: a group of a frame costs a millisecond, and a sweep has thousands of cases.
    cases: dict[tuple[str, str, str], list[_Row]] = {}
    rows = [_Row(record, partial) for record in times]
    timed = [row for row in rows if len(row.record["rounds"])]
    medians = stats.all_round_medians([(row.record["samples"], row.record["rounds"]) for row in timed])
    for row, own in zip(timed, medians, strict=True):
        row.medians = own
    for row in rows:
        cases.setdefault((row.record["run_id"], row.record["case_id"], row.record["metric"]), []).append(row)
    return cases


class _Row:
    """One stored row of a time."""

    def __init__(self, record: dict[str, Any], partial: bool = False) -> None:
        self.record = record
        self.arm: str = record["arm"]
        self.is_control = arm_of(record).control
        self.baseline: str = record["baseline"] or ""
        self.regime: str = record["regime"] or ""
        self.axes: str = record["axes"]
        self.env_id: str = record["env_id"]
        self.value: float = record["value"]
        self.timing = parse(record["timing"])
        self.medians: dict[int, float] = {}  # of the samples of each round; none where one of them is no time
        self.partial = partial and record["status"] == "partial"
        self.ok: bool = record["status"] == "ok" or self.partial

    @property
    def why_not(self) -> str:
        """Why it has no time, in its row's own words; "" where it has one."""
        return "" if self.ok else self.record["reason"]

    @property
    def outcome(self) -> str:
        """Status and reason of an arm without a time."""
        return f"{self.record['status']}: {self.why_not}"

    @property
    def method(self) -> str:
        """How it was timed."""
        return method_of(self.timing)

    @property
    def is_one_tick(self) -> bool:
        """Whether all samples are one and the same number: the clock cannot tell them apart."""
        samples = self.record["samples"]
        return len(samples) >= MIN_ROUNDS and min(samples) == max(samples)

    @property
    def clock_mhz(self) -> float:
        """Median SM clock over the samples; NaN where none was read."""
        clocks = [clock for clock in self.record.get("sample_clock_mhz", ()) if clock > 0]
        return statistics.median(clocks) if clocks else math.nan

    @property
    def ran_fp8(self) -> bool:
        return any(str(dtype).startswith(FP8_DTYPES) for dtype in parse(self.record["flops"]))

    @property
    def ran_no_layer(self) -> bool:
        """Whether the arm of an FP8 recipe converted no layer of its model."""
        return arm_of(self.record).has_fp8 and parse(self.record["resolved"]).get("fp8_layers") == 0

    @property
    def tokens(self) -> float:
        """Tokens of one training step; 0 where the row is of no such step."""
        return float(parse(self.record["resolved"]).get("tokens_per_step") or 0)

    def log_ratios(self, arm: _Row) -> list[float]:
        """log(median of this one / median of `arm`), a value a shared round; none where they share no round."""
        # Steps of different batches compare by the token: a step of twice the tokens may take twice the time.
        more = math.log(arm.tokens / self.tokens) if arm.tokens and self.tokens else 0.0
        mine, theirs = self.medians, arm.medians
        return [math.log(mine[r] / theirs[r]) + more for r in mine if r in theirs]


def _by_regime(rows: list[_Row]) -> list[tuple[str, dict[str, _Row]]]:
    """The arms of a case in each regime. An arm that never ran has no regime; it is missing from all of them."""
    never_ran = {r.arm: r for r in rows if not r.regime}
    regimes = list(dict.fromkeys(r.regime for r in rows if r.regime))
    return [(name, never_ran | {r.arm: r for r in rows if r.regime == name}) for name in regimes or [""]]


def _noise_floors(groups: Sequence[Mapping[str, _Row]]) -> list[dict[str, float]]:
    """The noise floor of each baseline that was timed twice, of each group of arms."""
    pairs = [
        (place, original.arm, original.log_ratios(again))
        for place, arms in enumerate(groups)
        for again in arms.values()
        if again.is_control and again.ok and (original := arms.get(again.baseline)) is not None
        if original.ok and again.env_id == original.env_id
    ]
    floors: list[dict[str, float]] = [{} for _ in groups]
    for (place, arm, _), control in zip(pairs, stats.all_paired([logs for *_, logs in pairs]), strict=True):
        if control.has_interval:
            floors[place][arm] = control.as_floor
    return floors


def _compare(arm: _Row, base: _Row | None, regime: str, found_effect: Effect) -> dict[str, object]:
    speedup = low = high = math.nan
    rounds, condition = 0, _condition(arm, base)
    if not arm.ok:
        verdict, reason = "missing", arm.outcome
    elif base is None:
        verdict, reason = "missing", f"its baseline {arm.baseline} was not measured in this run"
    elif not base.ok:
        verdict, reason = "missing", f"its baseline {base.arm} was {base.outcome}"
    elif arm.env_id != base.env_id:
        found = differences((parse(base.record["env"]), parse(arm.record["env"])))
        differing = in_words({n: v for n, v in found.items() if n not in IDENTITY}, most=6)
        verdict, reason = "unclear", f"different environment: {differing or f'{base.env_id} != {arm.env_id}'}"
    elif methods := _methods(base, arm):
        verdict, reason = "unclear", methods
    else:
        rounds, speedup = found_effect.rounds, found_effect.speedup
        verdict, reason = judged(found_effect)
        if found_effect.has_interval:
            low, high = math.exp(-found_effect.log_high), math.exp(-found_effect.log_low)
        # Slower than a throttled baseline is slower all the more, and under sustained load throttling is a part of the cost.
        against_fp8 = regime == "sustained" or (condition == ONE_SIDE and base.timing.get("throttled"))
        if condition in DISTURBED and not (verdict == "slower" and against_fp8):
            verdict, reason = "unclear", condition
        if arm.partial or base.partial:  # what was cut off decides nothing
            verdict, reason = "unclear", (arm if arm.partial else base).record["reason"]
    return {
        **{column: arm.record[column] for column in _COLUMNS if column in arm.record},
        "regime": regime,
        "baseline_fields": None if base is None else base.record.get("arm_fields"),
        "baseline_value": base.value if base is not None and base.ok else math.nan,
        "value": arm.value if arm.ok else math.nan,
        "speedup": speedup,
        "low": low,
        "high": high,
        "rounds": rounds,
        "floor": found_effect.floor,
        "fp8": arm.ran_fp8 and base is not None and not base.ran_fp8,
        "verdict": verdict,
        "reason": reason,
        "why_not": arm.why_not,
        "cut_off": arm.partial or (base is not None and base.partial),
        "condition": condition,
        "clock_mhz": arm.clock_mhz,
        "baseline_clock_mhz": base.clock_mhz if base is not None else math.nan,
    }


def apart(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Why the times of two rows of different runs decide nothing about each other: one of `APART`; "" where they may.

    Throttling of both sides and another clock are causes of a difference, and not in the way of seeing it.
    """
    sides = _Row(one), _Row(other)
    condition = _measured(sides)
    if _methods(*sides):
        return METHODS
    return condition if condition in APART else ""


def method_of(timing: Mapping[str, Any]) -> str:
    """How a row was timed, by its column `timing`: two methods on one kernel can differ by more than the arms do."""
    return ", ".join(str(timing[key]) for key in ("method", "l2") if timing.get(key))


def _methods(one: _Row, other: _Row) -> str:
    return f"{METHODS}: {one.method} and {other.method}" * (one.method != other.method)


def _condition(arm: _Row, base: _Row | None) -> str:
    return NO_FP8 if arm.ok and arm.ran_no_layer else _measured([arm] if base is None else [arm, base])


def _measured(sides: Sequence[_Row]) -> str:
    if any(side.timing.get("contended") for side in sides):
        return BESIDE
    throttled = sum(bool(side.timing.get("throttled")) for side in sides)
    if throttled:
        return (ONE_SIDE, BOTH_SIDES)[throttled - 1]
    if len(sides) < 2:
        return ""
    clocks = sorted(side.clock_mhz for side in sides)
    if clocks[-1] > CLOCKS_APART * clocks[0]:
        return OTHER_CLOCKS
    return ONE_TICK if all(side.is_one_tick for side in sides) else ""


def judged(found: Effect) -> tuple[str, str]:
    """Verdict on an effect and its reason: its direction; but a tie where it is shown to be one, and a gain beside an A/A control."""
    floor = found.floor
    if not found.has_interval:
        return "unclear", f"{found.rounds} paired rounds; an interval needs at least {MIN_ROUNDS}"
    low, high = math.exp(-found.log_high), math.exp(-found.log_low)  # of the speedup
    away = f"{found.size - 1:.1%} apart"
    if found.direction == "same":
        if floor > LOUD_FLOOR:
            return (
                "unclear",
                f"{away}, but two copies of the baseline seem up to {floor - 1:.0%} apart: too noisy",
            )
        tie = max(floor, TIE)
        if max(high, 1 / low) > tie:
            return "unclear", f"{away}, but the interval {low:.3f} to {high:.3f} is wider than {tie - 1:.1%}"
        return "same", f"{away}: within the A/A noise floor of {floor - 1:.1%}"
    known = "no A/A control in this regime" if math.isnan(floor) else f"A/A noise floor {floor - 1:.1%}"
    if found.direction == "unclear":
        return "unclear", f"the interval {low:.3f} to {high:.3f} holds 1; {known}"
    is_bare_gain = found.direction == "faster" and math.isnan(floor)  # two equal things may seem so far apart
    verdict = "unclear" if is_bare_gain else found.direction
    return verdict, f"the interval {low:.3f} to {high:.3f} excludes 1; {known}"
