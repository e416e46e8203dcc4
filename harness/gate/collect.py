"""Collect: what the worker processes of one side say, put together as rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.gate.policy import CONDITIONS
from harness.gate.sides import CONTROL_SUITE
from harness.store.case import Case, arm_of
from harness.store.errors import Cause, known
from harness.store.measurement import METRICS, Measurement

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CONTROL = "control"  # the worker's name of the control
CONTROL_ARM = "bf16_mm"
CONTROL_CASE = Case.of(CONTROL_SUITE, {"what": CONTROL_ARM})
CONTROL_ROW = {
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
DURATIONS = ("ms", "us", "s")
UNBUILT = "time_ms"  # an arm that could not even be built says so under this metric, whatever its own is

Key = tuple[str, str, str, str]  # case, arm, metric, part


@dataclass(slots=True)
class Row:
    """One row under way: what the processes of one side said about one metric of one arm."""

    about: Mapping[str, Any]
    timed: bool = False
    samples: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    late: int = 0
    timing: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    cause: Cause = Cause.NONE  # of the failure

    def add(self, number: int, samples: Sequence[float], clocks: Sequence[float] = ()) -> None:
        """Adds samples of a round."""
        self.samples += samples
        self.rounds += [number] * len(samples)
        self.clocks += clocks

    def fail(self, why: str, cause: Cause) -> None:
        """Notes why there is no number; the first reason stands."""
        if not self.failure:
            self.failure, self.cause = why, cause

    def measurement(self) -> Measurement:
        """The row of the store."""
        about, metric = self.about, METRICS[str(self.about["metric"])]
        failure, cause = self.failure, self.cause or _cause(about)
        if about["status"] == "ok" and not self.samples and not failure:
            failure, cause = "no block of it was timed", Cause.ERROR
        more: dict[str, Any] = {
            "status": "failed" if failure else about["status"],
            "reason": failure or str(about.get("reason", "")),
            "cause": cause,
        }
        if more["status"] == "ok":
            more = {"status": "ok", "samples": tuple(self.samples), "rounds": tuple(self.rounds)}
            if metric.unit not in DURATIONS:
                # No time, so the same in every process; where it is not, the worst of them stands.
                worst = min if metric.better == "higher" else max
                more |= {"samples": (worst(self.samples),), "rounds": ()}
            if len(self.clocks) == len(self.samples):
                more["sample_clock_mhz"] = tuple(self.clocks)
            if self.timed:
                more |= {"regime": "isolated", "timing": {**self.timing, "late_samples": self.late}}
        names = ("suite", "case_id", "arm", "baseline", "axes", "seed", "metric")
        return Measurement(
            **{name: about[name] for name in names},
            **more,
            arm_fields=arm_of(about),
            part=str(about.get("part", "")),
            resolved=about.get("resolved", {}),
            flops=about.get("flops", {}),
            bytes_moved=about.get("bytes_moved"),
        )


@dataclass(slots=True)
class Collected:
    """The rows of one side, of all rounds of a stage."""

    env: dict[str, Any] = field(default_factory=dict)
    env_id: str = ""
    rows: dict[Key, Row] = field(default_factory=dict)

    def measurements(self) -> Iterator[Measurement]:
        """The rows of a finished stage. A round in which an arm could not be built fails whatever else it yields."""
        lost = {key[:2]: row for key, row in self.rows.items() if key[2] == UNBUILT and row.failure}
        for key, row in self.rows.items():
            if row.timed and key[:2] in lost:
                row.fail(lost[key[:2]].failure, lost[key[:2]].cause)
            yield row.measurement()

    def plan(self, env: dict[str, Any], env_id: str) -> None:
        """Takes where it is measured."""
        self.env, self.env_id = env, env_id

    def take(self, number: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds what `prepare` said."""
        for said in rows:
            if said["metric"] not in METRICS:  # a metric that only the other commit knows
                continue
            row = self._row(said)
            row.timed |= said["status"] == "ok" and not said.get("samples")
            if said["status"] == "failed":
                row.fail(f"{said.get('reason', '')} (round {number})", _cause(said))
            row.add(number, said.get("samples", ()))

    def time(self, number: int, case_id: str, block: Mapping[str, Any]) -> None:
        """Adds one block of every arm."""
        for name, said in block.items():
            row = self._row(CONTROL_ROW, timed=True) if name == CONTROL else self._timed(case_id, name)
            assert row is not None, f"{name} of {case_id} was timed without having been prepared"
            if "samples" in said:
                row.add(number, said["samples"], said["clocks"])
                row.late += said["late"]
                # What struck one block, struck the row.
                struck = (n for n in CONDITIONS if row.timing.get(n) or said["timing"].get(n))
                row.timing = {**said["timing"], **dict.fromkeys(struck, True)}
            elif name != CONTROL:
                row.fail(f"{said['fault']} (round {number})", known(said["cause"]))

    def died(self, number: int, case: Mapping[str, Any], why: str) -> None:
        """The process of a round was lost: every arm of the case under way fails, if it was heard of or not."""
        for arm, baseline in case["arms"].items():
            about = {**case, "arm": arm, "baseline": baseline, "metric": UNBUILT, "status": "ok"}
            row = self._timed(case["case_id"], arm) or self._row(about, timed=True)
            row.fail(f"worker: {why} (round {number})", Cause.DIED)

    def _row(self, about: Mapping[str, Any], *, timed: bool = False) -> Row:
        key = (about["case_id"], about["arm"], about["metric"], str(about.get("part", "")))
        return self.rows.setdefault(key, Row(about, timed))

    def _timed(self, case_id: str, arm: str) -> Row | None:
        return next((r for k, r in self.rows.items() if k[:2] == (case_id, arm) and r.timed), None)


def _cause(said: Mapping[str, Any]) -> Cause:
    """What a worker gave as the cause; NONE where it gave none."""
    return known(said["cause"]) if said.get("cause") else Cause.NONE
