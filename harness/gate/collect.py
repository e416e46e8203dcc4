"""Collect: the rows of one side, of several rounds, as one row each. A round is a run of its own; its rows are those of any sweep."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from harness.gate.policy import CONDITIONS
from harness.store.case import arm_of
from harness.store.errors import Cause, known
from harness.store.measurement import METRICS, Measurement
from harness.store.outside import parse
from harness.store.rows import grouped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pandas as pd

REPEATED = ("ms", "us", "s", "J")  # units of what each process shows anew
UNBUILT = "time_ms"  # an arm that could not even be built says so under this metric, whatever its own is


@dataclass(slots=True)
class Collected:
    """The rows of one side, of all rounds of a stage, each with the number of its round; and where they were measured."""

    env: dict[str, Any] = field(default_factory=dict)
    env_id: str = ""
    rows: list[tuple[int, Measurement]] = field(default_factory=list)

    def take(self, number: int, frame: pd.DataFrame) -> None:
        """Adds the rows of a round as they were stored, and takes over where it was measured."""
        for row in frame.to_dict("records"):
            self.env, self.env_id = dict(parse(row["env"])), row["env_id"]
            if row["metric"] in METRICS:  # one that only the other commit knows is left out
                self.rows.append((number, _measurement(row)))

    def died(self, number: int, case: Mapping[str, Any]) -> None:
        """The process of a round was lost: every arm of the case under way fails, whether it was heard of or not."""
        about: dict[str, Any] = {name: case[name] for name in ("suite", "case_id", "axes", "seed")}
        about |= {"metric": UNBUILT, "status": "failed", "reason": f"its process {case['why']}"}
        self.rows += [
            (number, Measurement(**about, arm=arm, baseline=base, cause=Cause.DIED))
            for arm, base in case["arms"].items()
        ]

    def measurements(self) -> Iterator[Measurement]:
        """The rows of a finished stage. A round in which an arm could not be built fails whatever else it yields."""
        by_key = grouped(
            ((row.case_id, row.arm, row.metric, row.part), (number, row)) for number, row in self.rows
        )
        lost = {key[:2]: _failed(rows) for key, rows in by_key.items() if key[2] == UNBUILT}
        for key, rows in by_key.items():
            failed = _failed(rows)
            if failed is None and any(row.timing for _, row in rows):
                failed = lost.get(key[:2])
            yield _together(rows) if failed is None else replace(
                rows[0][1], status="failed", reason=failed.reason, cause=failed.cause, samples=(), rounds=(), sample_clock_mhz=()
            )  # fmt: skip


def _measurement(row: Mapping[Any, Any]) -> Measurement:
    """A stored row."""
    own: dict[str, Any] = {each.name: row[each.name] for each in fields(Measurement)}
    own |= {name: parse(row[name]) for name in ("resolved", "flops", "timing")}
    own |= {name: tuple(row[name]) for name in ("samples", "rounds", "sample_clock_mhz")}
    own["bytes_moved"] = None if row["bytes_moved"] != row["bytes_moved"] else row["bytes_moved"]
    return Measurement(**{**own, "cause": known(row["cause"]), "arm_fields": arm_of(row)})


def _failed(rows: Sequence[tuple[int, Measurement]]) -> Measurement | None:
    """The first row that failed, and in which round."""
    failed = (
        replace(row, reason=f"{row.reason} (round {number})")
        for number, row in rows
        if row.status == "failed"
    )
    return next(failed, None)


def _together(rows: Sequence[tuple[int, Measurement]]) -> Measurement:
    """The rows of several rounds as one: those that have a number."""
    sound = [(number, row) for number, row in rows if row.status == "ok"]
    if not sound:
        return rows[0][1]
    first, metric = sound[0][1], METRICS[sound[0][1].metric]
    samples = [sample for _, row in sound for sample in row.samples]
    if metric.unit not in REPEATED:
        # No time, so the same in every process; where it is not, the worst of them stands.
        worst = min if metric.better == "higher" else max
        return replace(first, samples=(worst(samples),), rounds=(), sample_clock_mhz=())
    timing = dict(sound[-1][1].timing)
    if timing:
        # What struck one block, struck the row.
        timing |= {name: True for name in CONDITIONS if any(row.timing.get(name) for _, row in sound)}
        timing["late_samples"] = sum(int(row.timing.get("late_samples") or 0) for _, row in sound)  # type: ignore[call-overload]
    return replace(
        first,
        samples=tuple(samples),
        rounds=tuple(number for number, row in sound for _ in row.samples),
        sample_clock_mhz=tuple(clock for _, row in sound for clock in row.sample_clock_mhz),
        timing=timing,
    )
