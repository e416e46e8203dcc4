"""Roofline: rate of each GEMM by its arithmetic intensity, under the ceilings measured here and the published ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.report.drawing import INK, MUTED, SERIES, Chart, evenly, log_axis, sheet, styled
from harness.report.records import arm_records, newest
from harness.report.table import known
from harness.store.compare import FP8_DTYPES
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

    from harness.report.runs import Machine

MOST_POINTS = 200
KINDS = {"bf16": (INK, "p"), "fp8": (SERIES[7], "*")}  # no recipe's colour


@styled
def roofline(machine: Machine) -> list[Chart]:
    """One figure of the suite gemm; a kind of GEMM (bf16, fp8) has its own marks and its own ceilings."""
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for r in newest(arm_records(machine, "gemm")):
        if r["regime"] == "isolated" and known(r["tflops"]) and known(r["bytes_moved"]) and r["bytes_moved"]:
            work = parse(r["flops"])
            kind = "fp8" if any(str(d).startswith(FP8_DTYPES) for d in work) else "bf16"
            points[kind].append((sum(work.values()) / r["bytes_moved"], r["tflops"]))
    if not any(points.values()):
        return []
    drawn = sheet(f"roofline-{machine.env_id}", 3.9)
    axes = drawn.axes
    every = [p for own in points.values() for p in own]
    low, high = min(x for x, _ in every) / 2, max(x for x, _ in every) * 3
    measured, nominal = _measured(machine), _nominal(machine)
    for roofs, style, word in ((measured, "-", "measured"), (nominal, "--", "published peak")):
        _roofs(axes, roofs, low, high, style, word)
    for kind, (colour, mark) in KINDS.items():
        own = sorted(points[kind])
        if own:
            own = [own[i] for i in evenly(len(own), MOST_POINTS)]
            axes.plot(*zip(*own, strict=True), mark, color=colour, fillstyle="none", label=f"{kind} GEMMs")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    for axis in (axes.xaxis, axes.yaxis):
        log_axis(axis)
    axes.set_xlabel("FLOP per byte read and written")
    axes.set_ylabel("TFLOP/s")
    return [drawn.chart("Roofline of the GEMMs", _said(machine, measured, nominal, len(every)))]


def _measured(machine: Machine) -> dict[str, float]:
    """TFLOP/s by kind and TB/s as "copy", the best of this machine; what is not known is left out."""
    if machine.ceilings is None:
        return {}
    copies = [rate / 1e12 for _, rate in machine.ceilings.moves.get("copy", ())]
    return machine.ceilings.achieved | ({"copy": max(copies)} if copies else {})


def _nominal(machine: Machine) -> dict[str, float]:
    if machine.device is None:
        return {}
    rates = {"bf16": machine.device.peak_tflops("bf16"), "fp8": machine.device.peak_tflops("e4m3")}
    return {k: v for k, v in rates.items() if v is not None} | {"copy": machine.device.bandwidth_tb_s}


def _roofs(axes: Axes, rates: Mapping[str, float], low: float, high: float, style: str, word: str) -> None:
    """Bandwidth up to the ridge of each kind, then its rate."""
    intensity = np.geomspace(low, high, 60)
    for kind, (colour, _) in KINDS.items():
        if kind in rates:
            limit = np.full_like(intensity, rates[kind])
            if "copy" in rates:
                limit = np.minimum(limit, intensity * rates["copy"])
            axes.plot(intensity, limit, style, color=colour, linewidth=1.0, label=f"{kind}, {word}")
    if "copy" in rates and not rates.keys() & KINDS.keys():
        axes.plot(
            intensity, intensity * rates["copy"], style, color=MUTED, linewidth=1.0, label=f"copy, {word}"
        )


def _said(machine: Machine, measured: Mapping[str, float], nominal: Mapping[str, float], count: int) -> str:
    sentences = ["A mark a GEMM and arm, isolated regime; bytes are operands and result, moved once."]
    sentences.append("Full lines: the best matmul rates and copy bandwidth measured on this device.")
    if "copy" not in measured:
        sentences.append("Its bandwidth was not measured in these runs (sweep=ceilings).")
    if nominal:
        sentences.append("Broken lines: published dense peaks.")
    else:
        sentences.append(
            "Published peak: N/A" + (", this device is not in the table of peaks." if machine.is_gpu else ".")
        )
    if count > MOST_POINTS * len(KINDS):
        sentences.append(f"Drawn are {MOST_POINTS} of each kind, spread by intensity; the table has all.")
    return " ".join(sentences)
