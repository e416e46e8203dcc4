"""MFU: what share of a GPU's peak a training step reaches, with every denominator named.

FLOPs are counted by the dtype that each GEMM really ran in, and each dtype has a peak of its own. The least time that
a step could take is then `T_min = sum over d of F_d / P_d`, and

    mixed MFU = T_min / T_step

It equals PaLM's MFU (arXiv:2204.02311, appendix B) where all GEMMs are bf16, and is never above 100 % where only FLOPs
that really run are counted, since no GEMM is faster than the peak of its own dtype. One number is not enough: the same
step reads as 28 % of the FP8 peak, 55 % of the bf16 peak and 34 % mixed. So the columns of `COLUMNS` stand together,
and each says by which rule FLOPs were counted. An unknown peak gives None (N/A), never a stand-in; so do the model's
FLOPs where only those that ran were counted, recomputed ones among them.

Pure functions; no torch.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.store.compare import FP8_DTYPES, SECONDS
from harness.store.outside import parse
from harness.store.tables import beside

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.machine.hardware import Device


@dataclass(frozen=True, slots=True)
class MfuColumn:
    """One figure of `Utilization`, as a report names it."""

    name: str
    title: str
    unit: str  # "" for a count, "share" for 0..1
    meaning: str


_WORDS = beside(__file__, "mfu.yaml")
FORMULAS: Mapping[str, str] = _WORDS["formulas"]
FLAGS: Mapping[str, str] = _WORDS["flags"]
COLUMNS = tuple(MfuColumn(name, *texts) for name, texts in _WORDS["columns"].items())
EXECUTED = frozenset({"causal", "counted", "gemm"})  # rules that count nothing that does not run


@dataclass(frozen=True, slots=True)
class Utilization:
    """How well one step uses a GPU; the figures of `COLUMNS`, None where a peak or a count is not known.

    By the rule "counted" the model's FLOPs are not known, so that HFU and what is achievable stand alone.

    Attributes:
        tokens_per_s: of one GPU.
        model_tflops: 1e12 FLOP/s of one GPU.
        mfu_mixed, mfu_bf16_peak, mfu_fp8_peak, hfu, achievable, fp8_share: 0..1, or above where a flag says why.
        formula: a key of `FORMULAS`.
        flags: keys of `FLAGS`.
    """

    tokens_per_s: float | None
    model_tflops: float | None
    mfu_mixed: float | None
    mfu_bf16_peak: float | None
    mfu_fp8_peak: float | None
    hfu: float | None
    achievable: float | None
    fp8_share: float
    formula: str
    flags: tuple[str, ...] = ()

    @property
    def doubts(self) -> list[str]:
        """The flags by which its own peak was passed: such a share is no headline."""
        return [flag for flag in self.flags if flag != "bf16_peak_passed"]


def floor_seconds(flops: Mapping[str, float], tflops: Mapping[str, float | None]) -> float | None:
    """Least time of the FLOPs, each dtype at its own rate: sum of F_d / P_d.

    >>> floor_seconds({"e4m3": 1979e12, "bf16": 989e12}, {"e4m3": 1979.0, "bf16": 989.0})
    2.0

    Args:
        flops: dtype -> FLOPs.
        tflops: dtype -> 1e12 FLOP/s; None or missing where it is not known.

    Returns:
        Seconds; None where the rate of a dtype that occurs is not known.
    """
    rates = {dtype: tflops.get(dtype) for dtype, amount in flops.items() if amount}
    if not all(rates.values()):
        return None
    return sum(flops[dtype] / (rate * 1e12) for dtype, rate in rates.items() if rate)


def utilization(
    flops: Mapping[str, float],
    seconds: float,
    device: Device | None,
    *,
    formula: str = "palm",
    tokens: float | None = None,
    recomputed: Mapping[str, float] | None = None,
    achieved: Mapping[str, float] | None = None,
    clock_mhz: float | None = None,
) -> Utilization:
    """The columns of one step on one GPU.

    Args:
        flops: the model's FLOPs of the step by dtype ("bf16", "e4m3", "e5m2", "fp32"), nothing recomputed; by the rule
            "counted" all that ran.
        seconds: of the step.
        device: entry of the peak table; None gives N/A.
        formula: the rule behind `flops`, a key of `FORMULAS`.
        tokens: of the step.
        recomputed: FLOPs that activation checkpointing adds; {} for none, None where that is not known (HFU is N/A).
        achieved: dtype -> measured TFLOP/s of the best matmul of this GPU (`harness.rates`).
        clock_mhz: SM clock during the step, by which "impossible" is judged.

    Raises:
        ValueError: a time that is not above 0, FLOPs that are negative or not finite, an unknown formula.
    """
    _check(flops, seconds, formula)
    total = sum(flops.values())
    peaks = {dtype: device.peak_tflops(dtype) if device else None for dtype in (*flops, *(recomputed or {}))}
    executed = None
    if recomputed is not None:
        executed = {d: flops.get(d, 0.0) + recomputed.get(d, 0.0) for d in {**flops, **recomputed}}
    of_flops = _share(floor_seconds(flops, peaks), seconds)
    is_model = formula != "counted"
    of_bf16, of_fp8 = (
        _share(floor_seconds({rate: total}, {rate: device.peak_tflops(rate)}), seconds)
        if device and is_model
        else None
        for rate in ("bf16", "fp8")
    )
    return Utilization(
        tokens_per_s=None if tokens is None else tokens / seconds,
        model_tflops=total / seconds / 1e12 if is_model else None,
        mfu_mixed=of_flops if is_model else None,
        mfu_bf16_peak=of_bf16,
        mfu_fp8_peak=of_fp8,
        hfu=None if executed is None else _share(floor_seconds(executed, peaks), seconds),
        achievable=None
        if executed is None or achieved is None
        else _share(floor_seconds(executed, _by_dtype(achieved, executed)), seconds),
        fp8_share=sum(amount for dtype, amount in flops.items() if is_fp8(dtype)) / total if total else 0.0,
        formula=formula,
        flags=_flags(device, executed or flops, seconds, formula, of_flops, of_bf16, clock_mhz),
    )


def of_row(
    row: Mapping[str, Any], device: Device | None, achieved: Mapping[str, float] | None = None
) -> tuple[Utilization, ...]:
    """The columns of a stored time, once for each rule by which its FLOPs are known.

    Args:
        row: a row of the store with a time (`harness.store.rows.rows_of`): of the suite `train`, or of any suite that
            declares FLOPs, which then are those of its GEMMs.
        device: of the row.
        achieved: see `utilization`.

    Returns:
        PaLM's count first, then the causal one where it is stored; () without a time or without FLOPs.
    """
    given = counts(row)
    if row["status"] != "ok" or not given:
        return ()
    resolved = parse(row.get("resolved"))
    # Recomputation is stored by rule; FLOPs that were counted while they ran have it in them.
    again = resolved.get("flops_recomputed") or {}
    none_again = resolved.get("checkpointing", "none") in ("none", "selective")
    return tuple(
        utilization(
            counted,
            row["value"] * SECONDS[row["unit"]],
            device,
            formula=formula,
            tokens=resolved.get("tokens_per_step"),
            recomputed=again.get(formula, {} if none_again or formula in ("counted", "gemm") else None),
            achieved=achieved,
            clock_mhz=clock_of(row),
        )
        for formula, counted in given.items()
    )


def counts(row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """FLOPs of a stored time by dtype, once for each rule (`FORMULAS`) by which they are known; empty without any."""
    resolved = parse(row.get("resolved"))
    named = str(resolved.get("flops_formula_id") or "gemm")
    given = {named: parse(row.get("flops")), "causal": resolved.get("flops_causal") or {}}
    found = {rule: {str(d): float(f) for d, f in flops.items() if f} for rule, flops in given.items()}
    return {rule: flops for rule, flops in found.items() if flops} if found[named] else {}


def clock_of(row: Mapping[str, Any]) -> float | None:
    """Median SM clock of a stored time in MHz; None where it was not read."""
    clocks = [c for c in row.get("sample_clock_mhz", ()) if math.isfinite(c)]
    return statistics.median(clocks) if clocks else None


def is_fp8(dtype: str) -> bool:
    """Whether FLOPs of that dtype are FP8's."""
    return dtype.startswith(("fp8", *FP8_DTYPES))


def _flags(
    device: Device | None,
    executed: Mapping[str, float],
    seconds: float,
    formula: str,
    of_flops: float | None,
    of_bf16: float | None,
    clock_mhz: float | None,
) -> tuple[str, ...]:
    found = [flag] if (flag := passed(device, executed, seconds, formula, of_flops, clock_mhz)) else []
    if of_bf16 is not None and of_bf16 > 1 and any(map(is_fp8, executed)):
        found.append("bf16_peak_passed")
    return tuple(found)


def passed(
    device: Device | None,
    executed: Mapping[str, float],
    seconds: float,
    formula: str,
    share: float | None,
    clock_mhz: float | None,
) -> str:
    """The flag by which executed FLOPs passed the peaks of their own dtypes; "" where they did not. `share` is that of the published
    peaks, the rest as in `utilization`."""
    is_over = share is not None and share > 1
    if device is None or formula not in EXECUTED:
        return "masked_counted" * is_over
    over = device.exceeds_peak(executed, seconds, clock_mhz)
    if over and device.peak_tflops("fp8_fp16acc"):
        in_fp16 = {"fp8_fp16acc" if is_fp8(d) else d: f for d, f in executed.items()}
        return "over_peak" if device.exceeds_peak(in_fp16, seconds, clock_mhz) else "fp16_accumulation"
    return "over_peak" if over else "over_published" * (is_over and over is None)


def _check(flops: Mapping[str, float], seconds: float, formula: str) -> None:
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"a step of {seconds} s; expected a time above 0")
    wrong = {dtype: amount for dtype, amount in flops.items() if not (amount >= 0 and math.isfinite(amount))}
    if wrong:
        raise ValueError(f"FLOPs must be finite and not negative, got {wrong}")
    if formula not in FORMULAS:
        raise ValueError(f"unknown FLOP formula {formula!r}; known: {', '.join(FORMULAS)}")


def _share(least: float | None, seconds: float) -> float | None:
    return None if least is None else least / seconds


def _by_dtype(achieved: Mapping[str, float], flops: Mapping[str, float]) -> dict[str, float | None]:
    """Measured rates as `flops` names dtypes: e4m3 and e5m2 run at one rate."""
    return {dtype: achieved.get(dtype) or achieved.get("fp8" if is_fp8(dtype) else dtype) for dtype in flops}
