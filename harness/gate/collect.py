"""Collect: the rows of one side, of several rounds, as one row each. A round is a run of its own; its rows are those of any sweep."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from harness.gate.policy import CONDITIONS
from harness.store.case import arm_of
from harness.store.errors import Cause, known
from harness.store.measurement import METRICS, Measurement
from harness.store.outside import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pandas as pd

REPEATED = ("ms", "us", "s", "J")  # units of what each process shows anew
UNBUILT = "time_ms"  # an arm that could not even be built says so under this metric, whatever its own is

Key = tuple[str, str, str, str]  # case, arm, metric, part


@dataclass(slots=True)
class Collected:
    """The rows of one side, of all rounds of a stage; each with the number of its round."""

    env: dict[str, Any] = field(default_factory=dict)
    env_id: str = ""
    rows: dict[Key, list[tuple[int, Measurement]]] = field(default_factory=dict)

    def add(self, number: int, rows: Iterable[Measurement]) -> None:
        """Adds the rows of a round."""
        for row in rows:
            self.rows.setdefault((row.case_id, row.arm, row.metric, row.part), []).append((number, row))

    def merge(self, other: Collected) -> None:
        """Adds the rows of another round."""
        for key, rows in other.rows.items():
            self.rows.setdefault(key, []).extend(rows)
        if other.env_id:
            self.env, self.env_id = other.env, other.env_id

    def take(self, number: int, frame: pd.DataFrame) -> None:
        """Adds the rows of a round as they were stored, and takes over where it was measured."""
        rows: list[dict[Any, Any]] = frame.to_dict("records")
        # A metric that only the other commit knows is left out.
        self.add(number, (_measurement(row) for row in rows if row["metric"] in METRICS))
        for row in rows[:1]:
            self.env, self.env_id = dict(parse(row["env"])), row["env_id"]

    def died(self, number: int, case: Mapping[str, Any]) -> None:
        """The process of a round was lost: every arm of the case under way fails, whether it was heard of or not."""
        about: dict[str, Any] = {name: case[name] for name in ("suite", "case_id", "axes", "seed")}
        about |= {
            "metric": UNBUILT,
            "status": "failed",
            "reason": f"its process {case['why']}",
            "cause": Cause.DIED,
        }
        self.add(
            number, [Measurement(**about, arm=a, baseline=b) for a, b in case["arms"].items()]
        )  # fmt: skip

    def measurements(self) -> Iterator[Measurement]:
        """The rows of a finished stage. A round in which an arm could not be built fails whatever else it yields."""
        lost = {key[:2]: _failed(rows) for key, rows in self.rows.items() if key[2] == UNBUILT}
        for key, rows in self.rows.items():
            failed = _failed(rows)
            if failed is None and any(row.timing for _, row in rows):
                failed = lost.get(key[:2])
            yield _together(rows) if failed is None else replace(
                rows[0][1], status="failed", reason=failed.reason, cause=failed.cause, samples=(), rounds=(), sample_clock_mhz=()
            )  # fmt: skip


def _measurement(row: Mapping[str, Any]) -> Measurement:
    """A stored row."""
    own: dict[str, Any] = {each.name: row[each.name] for each in fields(Measurement)}
    own |= {name: parse(row[name]) for name in ("resolved", "flops", "timing")}
    own |= {name: tuple(row[name]) for name in ("samples", "rounds", "sample_clock_mhz")}
    own["bytes_moved"] = None if row["bytes_moved"] != row["bytes_moved"] else row["bytes_moved"]
    return Measurement(**{**own, "cause": known(row["cause"]), "arm_fields": arm_of(row)})


def _failed(rows: Sequence[tuple[int, Measurement]]) -> Measurement | None:
    """The first row that failed, and in which round."""
    for number, row in rows:
        if row.status == "failed":
            return replace(row, reason=f"{row.reason} (round {number})")
    return None


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
