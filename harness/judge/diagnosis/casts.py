"""Casts: scales that never move, and tensors that saturate, underflow or lose too much."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np

from harness.judge.diagnosis.finding import Finding, few
from harness.judge.verdict.rows import NEGATIVE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.judge.diagnosis.finding import Material, Record
    from harness.judge.verdict.rows import Setup

# Of a Gaussian tensor the casts reach 31.5 dB (e4m3) and 25.5 dB (e5m2, which only gradients use); alarms 3 dB below.
SQNR_ALARM = {"input": 28.0, "weight": 28.0, "grad_output": 22.0}
UNDERFLOW_ALARM = 0.01


def frozen_scales(material: Material) -> Iterator[Finding]:
    """Delayed scales that stay where they are while the tensors move."""
    series: dict[tuple[str, str, str, str], dict[str, Record]] = {}
    for r in material.records:
        if r.part and r.metric in ("scale_log2", "amax") and "delayed" in r.recipe and r.status == "ok":
            series.setdefault((r.run_id, r.setting, r.arm, r.part), {})[r.metric] = r
    frozen: dict[str, list[str]] = {}
    for (_, _, arm, part), found in series.items():
        if len(found) < 2 or len(found["scale_log2"].samples) < 5:
            continue
        scales, sizes = np.array(found["scale_log2"].samples), np.array(found["amax"].samples)
        sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
        if sizes.size and np.ptp(scales) == 0 and sizes.max() > 2 * sizes.min():
            frozen.setdefault(arm, []).append(
                f"{part}: scale 2^{scales[0]:g} at all {scales.size} looks, amax {sizes.min():.3g} to {sizes.max():.3g}"
            )
    for arm, lines in frozen.items():
        yield Finding(
            f"{arm}: {len(lines)} delayed scale{' never moves' if len(lines) == 1 else 's never move'}",
            few(lines),
            "the amax history is recorded and never turned into scales",
            "call fp8core.update_scales(model) once a step, after optimizer.step()",
        )


def unhealthy_casts(material: Material) -> Iterator[Finding]:
    """Layers whose casts saturate, underflow or lose more than a Gaussian tensor's would."""
    worst: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for r in material.records:
        if not r.part or r.status != "ok" or not r.recipe or r.arm == NEGATIVE:
            continue
        values = np.array(r.samples)
        values = values[np.isfinite(values)]
        if not values.size:
            continue
        dynamic = not any(word in r.recipe for word in ("delayed", "static"))
        role = r.part.rpartition(":")[2]
        alarms = worst.setdefault(r.arm, {"saturated": [], "underflow": [], "SQNR": []})
        if r.metric == "saturated_frac" and dynamic and values.max() > 0:
            alarms["saturated"].append((-values.max(), f"{r.part} {100 * values.max():.3g} % saturated"))
        elif r.metric == "underflow_frac" and values.max() > UNDERFLOW_ALARM:
            alarms["underflow"].append((-values.max(), f"{r.part} {100 * values.max():.3g} % underflow"))
        elif r.metric == "sqnr_db" and values.min() < SQNR_ALARM.get(role, -math.inf):
            alarms["SQNR"].append((values.min(), f"{r.part} SQNR {values.min():.1f} dB"))
    causes = {
        "saturated": (
            "a scale that is too large: under dynamic scaling nothing may saturate",
            "check the scale of these layers: fp8core.verify(step_fn, model)",
        ),
        "underflow": (
            "values much smaller than the largest one under the same scale round to zero",
            "a recipe with finer scales (rowwise, blockwise) for these layers",
        ),
        "SQNR": (
            "a tensor that its scale and format fit worse than a Gaussian one",
            "a recipe with finer scales, or these layers in bf16",
        ),
    }
    for arm, alarms in worst.items():
        for kind, lines in alarms.items():
            if lines:
                worst_of: dict[str, str] = {}
                for _, text in sorted(lines):  # of all seeds, the worst first
                    worst_of.setdefault(text.split()[0], text)
                names = list(worst_of.values())
                tensors = len(names)
                yield Finding(
                    f"{arm}: {kind} alarm in {tensors} tensor{'' if tensors == 1 else 's'}",
                    few(names),
                    *causes[kind],
                )


def worst_layers(material: Material, setup: Setup, arm: str) -> list[str]:
    """The tensor with the most saturation and the one with the most underflow, where the run was diagnosed."""
    setting = json.dumps(dict(setup.axes), sort_keys=True)
    lines = []
    for metric, word in (("saturated_frac", "saturation"), ("underflow_frac", "underflow")):
        shares = [
            (float(np.max(r.samples)), r.part)
            for r in material.records
            if r.metric == metric and r.arm == arm and r.part and r.setting == setting and len(r.samples)
        ]
        if shares and max(shares)[0] > 0:
            lines.append(f"most {word}: {max(shares)[1]}, {100 * max(shares)[0]:.3g} %")
    diagnosed = any(r.part and r.arm == arm and r.setting == setting for r in material.records)
    return lines or (
        ["no cast saturates or underflows"] if diagnosed else ["layers were not diagnosed in this run"]
    )
