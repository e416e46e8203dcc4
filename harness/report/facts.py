"""Facts: the conditions that a machine's numbers depend on, in words and units."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.store import text
from harness.store.compare import TIMES
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from harness.report.runs import Machine

# Fields of the environment fingerprint that get a name and a unit of their own; all others follow as they are.
NAMED = {
    "gpu": ("GPU", ""),
    "gpu_capability": ("compute capability", ""),
    "gpu_memory_gib": ("GPU memory", "GiB"),
    "gpu_sm_count": ("SMs", ""),
    "gpu_l2_mib": ("L2 cache", "MiB"),
    "power_limit_w": ("power limit", "W"),
    "max_sm_clock_mhz": ("highest SM clock", "MHz"),
    "ecc": ("ECC", ""),
    "mig": ("MIG", ""),
    "driver": ("driver", ""),
    "cuda": ("CUDA", ""),
    "hip": ("HIP", ""),
    "cublas": ("cuBLAS", ""),
    "cudnn": ("cuDNN", ""),
    "torch": ("torch", ""),
    "triton": ("Triton", ""),
    "python": ("Python", ""),
    "cpu": ("CPU", ""),
    "cpu_cores": ("CPU cores", ""),
    "cpu_threads": ("CPU hardware threads", ""),
    "threads": ("threads that torch uses", ""),
    "memory_gib": ("memory", "GiB"),
    "os": ("operating system", ""),
    "git_commit": ("commit", ""),
    "git_dirty": ("uncommitted changes", ""),
}


def facts(machine: Machine) -> tuple[tuple[str, str], ...]:
    """Every field of the environment, then how the times were taken, as (name, value with unit)."""
    every = [_flat(env) for env in machine.envs]
    flat = {key: [env.get(key) for env in every] for env in every for key in env}
    ordered = [*(k for k in NAMED if k in flat), *(k for k in flat if k not in NAMED)]
    named = {k: NAMED.get(k, (k.replace("_", " "), "")) for k in ordered}
    shown = {
        k: list(dict.fromkeys(_value(v, named[k][1]) for v in flat[k] if v is not None)) for k in ordered
    }
    known = [(named[k][0], "; ".join(values)) for k, values in shown.items() if values]
    absent = [named[k][0] for k, values in shown.items() if not values]
    measured = [*_peaks(machine), *_extensions(machine), ("measured on", machine.dates), *_how_timed(machine)]
    return (*known, *([("absent or unreadable", ", ".join(absent))] if absent else []), *measured)


def conditions(machine: Machine) -> str:
    """The conditions in one line: date, power limit, versions, commit."""
    env = machine.env
    parts = [machine.dates]
    if machine.is_gpu and env.get("power_limit_w") is not None:
        parts.append(f"power limit {env['power_limit_w']:g} W")
    parts += [f"{name} {env[name]}" for name in ("driver", "torch", "triton") if env.get(name)]
    commits = machine.commits
    if commits:
        told = [c.replace("+", " with uncommitted changes") for c in commits]
        parts.append(f"commit{'' if len(told) == 1 else 's'} {text.some(told)}")
    return " · ".join(parts)


def described(machine: Machine) -> str:
    """The device and its conditions, as they stand below a figure."""
    return f"{machine.name} \u00b7 {conditions(machine)}"


def _peaks(machine: Machine) -> list[tuple[str, str]]:
    if not machine.is_gpu:
        return []
    if machine.device is None:
        return [("published peak", f"{text.NONE}: this device is not in harness/machine/hardware/table.py")]
    rates = [f"{dtype} {rate:g} TFLOP/s" for dtype, rate in machine.device.tflops.items()]
    return [
        ("published peak, dense", ", ".join([*rates, f"{machine.device.bandwidth_tb_s:g} TB/s"])),
        ("source of the peak", machine.device.source),
    ]


def _extensions(machine: Machine) -> list[tuple[str, str]]:
    """What other packages brought to these rows: recipes, peers, suites, models and backends of theirs."""
    texts = machine.frame["resolved"].dropna().unique()
    rows = [parse(each).get("extensions", {}) for each in texts if '"extensions"' in each]
    seen = sorted({f"{package} {version}".strip() for row in rows for package, version in row.items()})
    return [("extensions, not part of the harness", ", ".join(seen))] if seen else []


def _how_timed(machine: Machine) -> list[tuple[str, str]]:
    frame = machine.frame
    rows = frame[frame["metric"].isin(TIMES) & (frame["status"] == "ok")]
    timings = [parse(t) for t in rows["timing"]]
    clocks = [c for own in rows["sample_clock_mhz"] for c in own if math.isfinite(c)]
    out = []
    for key, name in (
        ("method", "timing method"),
        ("l2", "L2 before a sample"),
        ("stop_reason", "stopped because"),
    ):
        seen = Counter(str(t[key]) for t in timings if t.get(key) is not None)
        if seen:
            out.append((name, ", ".join(f"{value} ({count})" for value, count in seen.most_common())))
    if clocks:
        low, middle, high = (text.number(float(q), 4) for q in np.quantile(clocks, (0, 0.5, 1)))
        out.append(("SM clock while timed", f"median {middle} MHz, {low} to {high} MHz"))
    for key, name in (
        ("throttled", "rows timed while throttled"),
        ("contended", "rows timed while another process ran"),
    ):
        if timings:
            known = [t[key] for t in timings if t.get(key) is not None]
            out.append((name, f"{sum(map(bool, known))} of {len(known)}" if known else text.NONE))
    return out


def _value(value: Any, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{shown} {unit}".strip()


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        out |= _flat(item, f"{prefix}{key} ") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return out
