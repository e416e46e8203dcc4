"""Measurement: one row of the store, a fact about one metric of one arm of one case.

A failure is a status with a reason. It is never a number and never a missing row.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from harness.store.arm import Arm, parse
from harness.store.cause import DEFAULT, RETRYABLE, Cause
from harness.store.private import public

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SCHEMA_VERSION = 4  # the one that is read and written

Status = Literal["ok", "partial", "skipped", "failed"]
Better = Literal["lower", "higher", "none"]

TIMES = ("time_ms", "launch_us")  # metrics that the arms of a case are sampled for in the same rounds


@dataclass(frozen=True, slots=True)
class Metric:
    """What a number means. One literal each in `METRICS`.

    `series`: the samples may be a curve over the steps of a run, with the steps as `rounds`; a row's value is then
    its last sample, not the median.
    """

    name: str
    unit: str
    better: Better
    meaning: str
    series: bool = False


def by_name(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Metrics by name.

    Raises:
        ValueError: a name is defined twice; which meaning its rows have would depend on the order.
    """
    table: dict[str, Metric] = {}
    for metric in metrics:
        if metric.name in table:
            raise ValueError(f"metric {metric.name!r} is defined twice; keep one literal")
        table[metric.name] = metric
    return table


METRICS = by_name(
    (
        Metric(
            "time_ms", "ms", "lower", "one call of the timed closure; `resolved.timed` says what it spans"
        ),
        Metric(
            "forward_backward_ms",
            "ms",
            "lower",
            "of the steps that time_ms is of: forward and backward passes of all microbatches, up to clipping",
        ),
        Metric(
            "compile_s",
            "s",
            "lower",
            'first call of a compiled arm, `resolved.compile_cache` says cold or warm; part "warm": compiled once '
            "more from the caches that the first call filled",
        ),
        Metric("sqnr_db", "dB", "higher", "20 log10(|ref| / |ref - x|) over the whole result", series=True),
        Metric("sqnr_row_min_db", "dB", "higher", "smallest SQNR of any row of the result"),
        Metric("grad_input_sqnr_db", "dB", "higher", "SQNR of the gradient of a layer's input"),
        Metric("grad_input_sqnr_row_min_db", "dB", "higher", "smallest SQNR of any of its rows"),
        Metric("grad_weight_sqnr_db", "dB", "higher", "SQNR of the gradient of a layer's weight"),
        Metric("grad_weight_sqnr_row_min_db", "dB", "higher", "smallest SQNR of any of its rows"),
        Metric(
            "bulk_sqnr_db",
            "dB",
            "higher",
            "SQNR of a product of the elements that are no outliers, cast together with those that are",
        ),
        Metric("accum_sqnr_db", "dB", "higher", "SQNR of an FP8 GEMM against the exact product of its codes"),
        Metric(
            "fp22_sqnr_db",
            "dB",
            "none",
            "SQNR of an FP8 GEMM against its codes summed in a 22-bit register, by the model of fp8core.gemm.accumulate",
        ),
        Metric(
            "fp22_promote128_sqnr_db",
            "dB",
            "none",
            "the same with promotion to float32 every 128 products",
        ),
        Metric("rel_err_max", "1", "lower", "largest |x - ref| over the largest |ref|"),
        Metric(
            "underflow_frac",
            "1",
            "lower",
            "share of nonzero inputs that the cast turned into zero",
            series=True,
        ),
        Metric(
            "saturated_frac",
            "1",
            "lower",
            "share of scaled inputs that would round beyond the largest FP8 value",
            series=True,
        ),
        Metric(
            "subnormal_frac",
            "1",
            "lower",
            "share of elements whose code is subnormal: fewer bits than the format promises",
            series=True,
        ),
        Metric("amax", "1", "none", "largest magnitude of a tensor before its cast", series=True),
        Metric(
            "scale_log2",
            "1",
            "none",
            "log2 of the scale (high precision to FP8) of a tensor; of the median one where it has several",
            series=True,
        ),
        Metric(
            "loss", "nats", "lower", "training loss of each step, before its update, in float32", series=True
        ),
        Metric(
            "heldout_loss",
            "nats",
            "lower",
            "mean loss over a fixed held-out set; rounds are the updates made before",
            series=True,
        ),
        Metric("grad_norm", "1", "none", "norm of all gradients of a step, before clipping", series=True),
        Metric(
            "fp8_grad_norm",
            "1",
            "none",
            "norm of the gradients of the converted layers' weights of a step, before clipping",
            series=True,
        ),
        Metric(
            "elapsed_s",
            "s",
            "lower",
            "seconds of training until the end of each step; evaluation and diagnostics left out",
            series=True,
        ),
        Metric(
            "mismatches",
            "count",
            "lower",
            "codes that differ from the reference cast; NaN compared as a class",
        ),
        Metric(
            "cast_bytes_per_elem",
            "byte",
            "lower",
            "bytes that fused casts of a layer's input, weight and output gradient must move, per bfloat16 element",
        ),
        Metric(
            "saved_bytes_per_elem",
            "byte",
            "lower",
            "bytes that a layer keeps for its backward pass, without the weight, per element of its input",
        ),
        Metric(
            "peak_memory_bytes",
            "byte",
            "lower",
            "most device memory that tensors of this arm held at once during a step, above what was there before it",
        ),
        Metric(
            "reserved_memory_bytes",
            "byte",
            "lower",
            "most device memory that the allocator held for this arm, above what it held before",
        ),
        Metric(
            "predicted_memory_bytes",
            "byte",
            "lower",
            "memory that a step was predicted to take before anything was allocated; `resolved.memory` has the parts",
        ),
        Metric(
            "joules_per_token",
            "J",
            "lower",
            "energy of the whole board over a block of steps, by the tokens of the block",
        ),
        Metric(
            "kernel_time_ms",
            "ms",
            "lower",
            "time of all kernels of a class (`part`, see harness.machine.kernels_by_name) in one profiled step",
        ),
        Metric(
            "sent_bytes",
            "byte",
            "lower",
            "bytes that a GPU sends, and receives, in the collectives of an optimizer step; `part` says what for",
        ),
        Metric(
            "predicted_step_ms",
            "ms",
            "lower",
            'an optimizer step as it was predicted, part by part; part "": all of it. Nothing was timed',
        ),
        Metric(
            "loss_deviation",
            "1",
            "lower",
            "largest relative difference between the losses of a parallel run and those of one process doing the same",
            series=True,
        ),
        Metric(
            "wire_bytes",
            "byte",
            "lower",
            "bytes that one rank gives to collectives in a step; the part names collective and dtype",
        ),
        Metric(
            "collectives",
            "count",
            "lower",
            "collectives that one rank takes part in during a step; the part says which",
        ),
        Metric(
            "step_ms",
            "ms",
            "lower",
            "one training step of all ranks; the part says which of several in the same rounds",
        ),
        Metric(
            "exposed_ms",
            "ms",
            "lower",
            "what a step takes longer than the same step with nothing on the wire, which its computing does not hide",
        ),
        Metric("kl_nats", "nats", "none", "KL divergence of a token's prediction from the reference's"),
        Metric(
            "kl_left_nats", "nats", "none", "its mean with the reference's layers in the place of the part's"
        ),
        Metric("logprob_gap_nats", "nats", "none", "|difference of a token's log-probability|"),
        Metric("top1_flips", "", "none", "share of tokens whose most probable successor differs"),
        Metric("launch_us", "us", "lower", "time per kernel of one element, launched back to back"),
    )
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row; the fields are the columns of the store (`harness.store.schema.SCHEMA`).

    `cause` says why there is no number; where it is left out, the store has what the status alone says
    (`harness.store.cause.DEFAULT`).
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
            "reason": public(self.reason),
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
