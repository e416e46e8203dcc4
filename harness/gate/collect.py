"""Collect: what the worker processes of one side say, put together as rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.gate.policy import CONDITIONS
from harness.gate.sides import CONTROL_SUITE
from harness.store.arm import arm_of
from harness.store.case import Case
from harness.store.cause import Cause, known
from harness.store.measurement import METRICS, Measurement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.store.measurement import Status

CONTROL = "control"  # the worker's name of the control
CONTROL_ARM = "bf16_mm"
CONTROL_CASE = Case.of(CONTROL_SUITE, {"what": CONTROL_ARM})
TIMED_REGIME = "isolated"
DURATIONS = ("ms", "us", "s")
UNBUILT = "time_ms"  # an arm that could not even be built says so under this metric, whatever its own is

Key = tuple[str, str, str, str]  # case, arm, metric, part


@dataclass(slots=True)
class Row:
    """One row under way: what the processes of one side said about one metric of one arm."""

    about: dict[str, Any]
    samples: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    late: int = 0
    timing: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    cause: Cause = Cause.NONE  # of the failure
    timed: bool = False

    def add(self, number: int, samples: Sequence[float], clocks: Sequence[float] = (), late: int = 0) -> None:
        self.samples += samples
        self.rounds += [number] * len(samples)
        self.clocks += clocks
        self.late += late

    def merge(self, later: Row) -> None:
        """Adds what a later round said."""
        self.samples += later.samples
        self.rounds += later.rounds
        self.clocks += later.clocks
        self.late += later.late
        self.time_by(later.timing)
        self.fail(later.failure, later.cause)
        self.timed |= later.timed

    def time_by(self, timing: Mapping[str, Any]) -> None:
        """Takes over how a block was timed; what struck one block, struck the row."""
        struck = {name: True for name in CONDITIONS if self.timing.get(name) or timing.get(name)}
        self.timing = {**(timing or self.timing), **struck}

    def fail(self, why: str, cause: Cause) -> None:
        """Notes why there is no number; the first reason stands."""
        if not self.failure:
            self.failure, self.cause = why, cause

    def measurement(self) -> Measurement:
        status: Status = "failed" if self.failure else self.about["status"]
        reason = self.failure or str(self.about.get("reason", ""))
        cause = self.cause or _cause(self.about)
        if status == "ok" and not self.samples:
            status, reason, cause = "failed", "no block of it was timed", Cause.ERROR
        sound = status == "ok"
        metric = METRICS[str(self.about["metric"])]
        if sound and metric.unit not in DURATIONS:
            # No time, so the same in every process; where it is not, the worst of them stands.
            self.samples = [min(self.samples) if metric.better == "higher" else max(self.samples)]
            self.rounds = []
        return Measurement(
            **{
                name: self.about[name]
                for name in ("suite", "case_id", "arm", "baseline", "axes", "seed", "metric")
            },
            arm_fields=arm_of(self.about),
            status=status,
            reason="" if sound else reason,
            cause=Cause.NONE if sound else cause,
            part=str(self.about.get("part", "")),
            regime=TIMED_REGIME if self.timed and sound else "",
            resolved=self.about.get("resolved", {}),
            samples=tuple(self.samples) if sound else (),
            rounds=tuple(self.rounds) if sound else (),
            sample_clock_mhz=tuple(self.clocks) if sound and len(self.clocks) == len(self.samples) else (),
            flops=self.about.get("flops", {}),
            bytes_moved=self.about.get("bytes_moved"),
            timing={**self.timing, "late_samples": self.late} if self.timed and sound else {},
        )


@dataclass(slots=True)
class Collected:
    """The rows of one side: of one round, or of all rounds of a stage."""

    env: dict[str, Any] = field(default_factory=dict)
    env_id: str = ""
    rows: dict[Key, Row] = field(default_factory=dict)

    def merge(self, later: Collected) -> None:
        """Adds a round that was measured to its end."""
        self.env, self.env_id = later.env, later.env_id
        for key, row in later.rows.items():
            if key in self.rows:
                self.rows[key].merge(row)
            else:
                self.rows[key] = row

    def measurements(self) -> list[Measurement]:
        """The rows of a finished stage. A round in which an arm could not be built fails whatever else it yields."""
        lost = {key[:2]: (row.failure, row.cause) for key, row in self.rows.items() if key[2] == UNBUILT}
        for key, row in self.rows.items():
            if row.timed:
                row.fail(*lost.get(key[:2], ("", Cause.NONE)))
        return [row.measurement() for row in self.rows.values()]

    def take(self, number: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds what `prepare` said."""
        for said in rows:
            if said["metric"] not in METRICS:  # a metric that only the other commit knows
                continue
            key = (said["case_id"], said["arm"], said["metric"], str(said.get("part", "")))
            row = self.rows.setdefault(key, Row(dict(said)))
            row.timed |= said["status"] == "ok" and not said.get("samples")
            if said["status"] == "failed":
                row.fail(f"{said.get('reason', '')} (round {number})", _cause(said))
            row.add(number, said.get("samples", ()))

    def time(self, number: int, case_id: str, block: Mapping[str, Any]) -> None:
        """Adds one block of every arm."""
        for name, samples in block["samples"].items():
            if name == CONTROL:
                key = (CONTROL_CASE.case_id, CONTROL_ARM, "time_ms", "")
                row = self.rows.setdefault(key, Row(_control_row(), timed=True))
            else:
                row = self._sure_row(case_id, name)
            row.add(number, samples, block["clocks"][name], block["late"][name])
            row.time_by(block["timing"][name])
        for name, fault in block["faults"].items():
            if name != CONTROL:
                row = self._sure_row(case_id, name)
                row.fail(f"{fault} (round {number})", known(block.get("causes", {}).get(name, Cause.RUN)))

    def died(self, number: int, case: Mapping[str, Any], why: str) -> None:
        """The process of a round was lost: every arm of the case under way fails, if it was heard of or not."""
        for arm, baseline in case["arms"].items():
            about = {n: case[n] for n in ("suite", "case_id", "axes", "seed")} | {
                "arm": arm,
                "baseline": baseline,
            }
            row = self._timed_row(case["case_id"], arm) or self.rows.setdefault(
                (case["case_id"], arm, UNBUILT, ""),
                Row(about | {"metric": UNBUILT, "status": "ok"}, timed=True),
            )
            row.fail(f"worker: {why} (round {number})", Cause.DIED)

    def _sure_row(self, case_id: str, arm: str) -> Row:
        row = self._timed_row(case_id, arm)
        assert row is not None, f"{arm} of {case_id} was timed without having been prepared"
        return row

    def _timed_row(self, case_id: str, arm: str) -> Row | None:
        return next((r for k, r in self.rows.items() if k[:2] == (case_id, arm) and r.timed), None)


def _cause(said: Mapping[str, Any]) -> Cause:
    """What a worker gave as the cause; NONE where it gave none."""
    return known(said["cause"]) if said.get("cause") else Cause.NONE


def _control_row() -> dict[str, Any]:
    return {
        "suite": CONTROL_SUITE,
        "case_id": CONTROL_CASE.case_id,
        "arm": CONTROL_ARM,
        "baseline": "",
        "axes": CONTROL_CASE.axes_json,
        "seed": 0,
        "metric": "time_ms",
        "status": "ok",
        "resolved": {"timed": "a bf16 product of fixed size, by PyTorch alone"},
    }
