"""Facts: the conditions that a machine's numbers depend on, in words and units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.report.runs import dates
from harness.store import text
from harness.store.compare import TIMES
from harness.store.outside import parse
from harness.store.tables import beside

if TYPE_CHECKING:
    from harness.report.runs import Machine


def facts(machine: Machine) -> list[tuple[str, str]]:
    """Every field of the environment, then how the times were taken, as (name, value with unit)."""
    known, every = names(), [_flat(env) for env in machine.envs]
    present = list(dict.fromkeys(key for env in every for key in env))
    found, absent = [], []
    for key in [*(k for k in known if k in present), *(k for k in present if k not in known)]:
        name, unit = known.get(key, (key.replace("_", " "), ""))
        values = dict.fromkeys(_value(v, unit) for env in every if (v := env.get(key)) is not None)
        if values:
            found.append((name, "; ".join(values)))
        else:
            absent.append(name)
    if absent:
        found.append(("absent or unreadable", ", ".join(absent)))
    return [
        *found,
        *_peaks(machine),
        *_what_ran(machine),
        ("measured on", dates(machine.days)),
        *_how_timed(machine),
    ]


def conditions(machine: Machine) -> str:
    """The conditions in one line: date, power limit, versions, commit."""
    env, parts = machine.env, [dates(machine.days)]
    if machine.is_gpu and env.get("power_limit_w") is not None:
        parts.append(f"power limit {env['power_limit_w']:g} W")
    parts += [f"{name} {env[name]}" for name in ("driver", "torch", "triton") if env.get(name)]
    commits = [c.replace("+", " with uncommitted changes") for c in machine.commits]
    if commits:
        parts.append(f"commit{'s' * (len(commits) > 1)} {text.some(commits)}")
    return " · ".join(parts)


def described(machine: Machine) -> str:
    """The device and its conditions, as they stand below a figure."""
    return f"{machine.name} · {conditions(machine)}"


@cache
def names() -> dict[str, tuple[str, str]]:
    """Fields of the environment fingerprint with a name, and a unit, of their own; all others follow as they are."""
    labels = beside(__file__, "environment.yaml")
    return {key: (each, "") if isinstance(each, str) else tuple(each) for key, each in labels.items()}


def _peaks(machine: Machine) -> list[tuple[str, str]]:
    device = machine.device
    if not machine.is_gpu:
        return []
    if device is None:
        return [
            ("published peak", f"{text.NONE}: this device is not in harness/machine/hardware/devices.yaml")
        ]
    rates = [f"{dtype} {rate:g} TFLOP/s" for dtype, rate in device.tflops.items()]
    dense = ", ".join([*rates, f"{device.bandwidth_tb_s:g} TB/s"])
    return [("published peak, dense", dense), ("source of the peak", device.source)]


def _what_ran(machine: Machine) -> list[tuple[str, str]]:
    """Backends and kernels that rows name, and what other packages brought to them: recipes, peers, suites, models, backends."""
    rows = [parse(each) for each in machine.frame["resolved"].unique()]
    found = {
        "backends": [str(row["backend"]) for row in rows if row.get("backend")],
        "kernels": [str(kernel)[:72] for row in rows for kernel in row.get("kernels") or ()],
        "extensions, not part of the harness": sorted(
            f"{package} {version}".strip()
            for row in rows
            for package, version in row.get("extensions", {}).items()
        ),
    }
    return [(name, text.some([*dict.fromkeys(own)], 8)) for name, own in found.items() if own]


def _how_timed(machine: Machine) -> list[tuple[str, str]]:
    rows = machine.pick(metric=TIMES, status="ok")
    timings = [parse(r["timing"]) for r in rows]
    clocks = np.concatenate([np.zeros(0), *(r["sample_clock_mhz"] for r in rows)])
    clocks = clocks[np.isfinite(clocks)]
    out = []
    words = {"method": "timing method", "l2": "L2 before a sample", "stop_reason": "stopped because"}
    words |= {"throttled": "rows timed while throttled", "contended": "rows timed while another process ran"}
    for key, name in words.items():
        values = [t[key] for t in timings if t.get(key) is not None]
        seen = Counter(map(str, values)).most_common()
        shown = ", ".join(f"{value} ({count})" for value, count in seen)
        if key in ("throttled", "contended"):
            shown = f"{sum(map(bool, values))} of {len(values)}" if values else text.NONE * bool(timings)
        out += [(name, shown)] * bool(shown)
    if clocks.size:
        low, middle, high = (text.number(float(q), 4) for q in np.quantile(clocks, (0, 0.5, 1)))
        out.append(("SM clock while timed", f"median {middle} MHz, {low} to {high} MHz"))
    marks = [
        (m, r["rounds"])
        for t, r in zip(timings, rows, strict=True)
        if isinstance(m := t.get("contended_rounds"), list)
    ]
    if marks:
        seen_of = f"{sum(len(m) for m, _ in marks)} of {sum(len(set(rounds)) for _, rounds in marks)}"
        out.append(("rounds seen beside other load", seen_of))
    return out


def _value(value: Any, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{f'{value:g}' if isinstance(value, float) else value} {unit}".strip()


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        out |= _flat(item, f"{prefix}{key} ") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return out
