"""Measurement: one row of the store, a fact about one metric of one arm of one case.

A failure is a status with a reason. It is never a number and never a missing row.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from harness.store.case import Arm, parse
from harness.store.errors import DEFAULT, RETRYABLE, Cause
from harness.store.private import public
from harness.store.tables import beside

if TYPE_CHECKING:
    from collections.abc import Mapping


FIELD = "verify_outcome"
LAYERS = "verify_layers"  # how many layers it compared, by the name of their recipe


class ProofOutcome(StrEnum):
    """Value of `resolved[FIELD]`; "" where nothing was asked."""

    NONE = ""
    PROVED = "proved"
    DISPROVED = "disproved"  # it found something wrong
    UNPROVEN = "unproven"  # it found nothing wrong, and could not compare everything or not run at all


def proof_outcome(resolved: Mapping[str, Any]) -> ProofOutcome:
    """The outcome that a row stores. Unproven: a word that is none, and a proof of other layers or of another recipe than the
    row's own; rows from before `LAYERS` was stored say how many GEMMs it counted."""
    word, layers = str(resolved.get(FIELD) or ""), resolved.get("fp8_layers")
    recipe = str(resolved.get("recipe")).split(",")[0]
    if word == ProofOutcome.PROVED and layers is not None:
        count = layers if isinstance(layers, int) else len(layers)
        if resolved.get("fp8_gemms", count) < count or (resolved.get(LAYERS) or {recipe: count}) != {
            recipe: count
        }:
            return ProofOutcome.UNPROVEN
    elif (
        word == ProofOutcome.PROVED
        and resolved.get("recipe")
        and {*(resolved.get(LAYERS) or [recipe])} != {recipe}
    ):
        return ProofOutcome.UNPROVEN
    return ProofOutcome(word) if word in set(ProofOutcome) else ProofOutcome.UNPROVEN


SCHEMA_VERSION = 4  # the one that is read and written

Status = Literal["ok", "partial", "skipped", "failed"]
Better = Literal["lower", "higher", "none"]

REASON = 2**14  # characters that are stored of a reason
TIMES = ("time_ms", "launch_us")  # metrics that the arms of a case are sampled for in the same rounds


@dataclass(frozen=True, slots=True)
class Metric:
    """What a number means; metrics.yaml has an entry each."""

    name: str
    unit: str
    better: Better
    meaning: str
    series: bool = False


METRICS = {name: Metric(name, **about) for name, about in beside(__file__, "metrics.yaml").items()}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row; the fields are the columns of the store (`harness.store.reading.SCHEMA`).

    `cause` says why there is no number; where it is left out, the store has what the status alone says
    (`harness.store.errors.DEFAULT`).
    """

    suite: str
    case_id: str
    arm: str
    axes: str  # canonical JSON
    metric: str
    status: Status
    seed: int = 0
    baseline: str = ""  # the arm that this one is to be compared with; "" for a baseline itself
    regime: str = ""  # "isolated" or "sustained" for times, "" otherwise
    part: str = ""  # of the case: "layers.0.attn.q:input", a kernel class, ...; "" for the whole
    resolved: Mapping[str, object] = field(default_factory=dict)  # what really ran
    samples: tuple[float, ...] = ()
    rounds: tuple[int, ...] = ()  # round of each sample, step of a series; rounds pair the arms of a case
    sample_clock_mhz: tuple[float, ...] = ()  # SM clock by sample, where it can be read
    reason: str = ""
    flops: Mapping[str, float] = field(default_factory=dict)  # by the dtype that each GEMM really ran in
    bytes_moved: float | None = None
    timing: Mapping[str, object] = field(default_factory=dict)  # method, l2, stop_reason, throttled, ...
    tries: int = 1  # processes that had the case in this sweep; the row is of the last
    cause: Cause = Cause.NONE
    arm_fields: Arm | None = None  # the arm as a record; None: the one of its name

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"unknown metric {self.metric!r}; known: {', '.join(sorted(METRICS))}")
        if self.arm_fields is not None and str(self.arm_fields) != self.arm:
            raise ValueError(
                f"arm {self.arm!r} with the fields of {str(self.arm_fields)!r}: {self.arm_fields}"
            )
        if self.status == "ok" and not self.samples:
            raise ValueError(
                f"{self.metric} of {self.suite}/{self.arm}: status 'ok' needs at least one sample"
            )
        if any(map(math.isnan, self.samples)):
            raise ValueError(
                f"{self.metric} of {self.suite}/{self.arm}: NaN is no measurement; it is a failure"
            )
        if self.status == "partial" and not (self.samples and self.reason):
            raise ValueError(
                f"{self.metric} of {self.suite}/{self.arm}: 'partial' needs samples and a reason"
            )
        if self.status not in ("ok", "partial") and (self.samples or not self.reason):
            raise ValueError(
                f"{self.metric} of {self.suite}/{self.arm}: {self.status!r} needs a reason and no samples"
            )
        if self.rounds and len(self.rounds) != len(self.samples):
            raise ValueError(f"{len(self.rounds)} rounds for {len(self.samples)} samples")
        if self.status == "ok" and self.cause:
            raise ValueError(
                f"{self.metric} of {self.suite}/{self.arm}: status 'ok' with the cause {self.cause!s}; "
                "a row that has its number has none"
            )
        Cause(self.cause)  # ValueError where it is none

    @property
    def retryable(self) -> bool:
        """Whether what kept the row from being measured may have passed: resume= then measures it again."""
        if self.status in ("ok", "partial"):
            return self.status == "partial"
        return self.cause in RETRYABLE

    @property
    def is_control(self) -> bool:
        """The row is of an A/A control."""
        return self.arm_fields is not None and self.arm_fields.control

    @property
    def value(self) -> float | None:
        """Median of the samples, of a series the last; None where there is none."""
        if not self.samples:
            return None
        return self.samples[-1] if METRICS[self.metric].series else statistics.median(self.samples)

    def as_row(self) -> dict[str, object]:
        """The columns that a measurement itself knows; the store adds run, sweep and environment."""
        meaning = METRICS[self.metric]
        return {
            "schema_version": SCHEMA_VERSION,
            "suite": self.suite,
            "case_id": self.case_id,
            "arm": self.arm,
            "arm_fields": (self.arm_fields or parse(self.arm)).as_json,
            "baseline": self.baseline,
            "axes": public(self.axes),
            "seed": self.seed,
            "resolved": to_json(self.resolved),
            "metric": self.metric,
            "unit": meaning.unit,
            "better": meaning.better,
            "regime": self.regime,
            "part": self.part,
            "samples": list(self.samples),
            "rounds": list(self.rounds),
            "sample_clock_mhz": list(self.sample_clock_mhz),
            "value": self.value,
            "status": self.status,
            "reason": public(self.reason)[:REASON],
            "cause": str(self.cause or DEFAULT[self.status]),
            "retryable": self.retryable,
            "flops": to_json(self.flops),
            "bytes_moved": self.bytes_moved,
            "timing": to_json(self.timing),
            "tries": self.tries,
        }


def to_json(value: object) -> str:
    """Canonical JSON of what may be stored of a value (`harness.store.private`)."""
    return json.dumps(public(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
