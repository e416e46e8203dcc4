"""Cards: the rows of many machines by the GPU that made them, and the cards that may be set side by side.

A card is a GPU of a host, both known by a hash (`gpu_uuid_hash`, `host_hash`); where a run was measured on a CPU, the
host is the card. Cards are alike if model, software and code agree. Power limit, driver and what else may differ
between them are differences to be listed: they explain an outlier and do not excuse it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.compare import AGAIN, TIMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas as pd

Key = tuple[str, str, str, str, str]  # suite, case id, arm, metric, regime

# What decides how fast code is, or which kernel runs: cards that differ here are not compared
SOFTWARE = ("torch", "triton", "cuda", "hip", "cublas", "cudnn", "torchao", "git_commit", "threads")
# What may differ between cards that are
VARIES = (
    "driver",
    "power_limit_w",
    "max_sm_clock_mhz",
    "ecc",
    "mig",
    "gpu_sm_count",
    "git_dirty",
    "os",
    "python",
)


@dataclass
class Card:
    """One GPU of one host and what it measured, the newest row of each measurement.

    Attributes:
        name: short, the same in every report of this card.
        model: of the GPU, or of the CPU.
        env: of its newest row.
        times: milliseconds (median of the samples) by measurement.
        baselines: the arm that each arm is compared with.
        clock_mhz: middle SM clock by measurement, where it could be read.
        throttled: the measurements during which the GPU throttled.
        failed: reason of each arm that has no time.
        checksums: of the suite `checksum`: by case and arm.
    """

    name: str
    model: str
    env: Mapping[str, Any]
    times: dict[Key, float] = field(default_factory=dict)
    baselines: dict[Key, str] = field(default_factory=dict)
    clock_mhz: dict[Key, float] = field(default_factory=dict)
    throttled: set[Key] = field(default_factory=set)
    failed: dict[Key, str] = field(default_factory=dict)
    checksums: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def alike(self) -> tuple[str, ...]:
        """What a card must share to be compared with this one."""
        return (self.model, *(str(self.env.get(name)) for name in SOFTWARE))


def cards(frame: pd.DataFrame) -> list[Card]:
    """The cards of some rows, by name.

    Args:
        frame: rows of the store with all attempts: cards that were given one run id must not replace each other.
    """
    found: dict[str, Card] = {}
    envs = {text: json.loads(text) for text in frame["env"].unique()}
    for row in frame.sort_values("attempt", kind="stable").to_dict("records"):
        env = envs[row["env"]]
        name = _name(env)
        card = found.setdefault(name, Card(name, _model(env), env))
        card.env = env
        if not str(row["arm"]).endswith(AGAIN):
            _add(card, row)
    return [found[name] for name in sorted(found)]


def groups(of: Iterable[Card]) -> list[list[Card]]:
    """Cards that may be compared, the largest group first."""
    found: dict[tuple[str, ...], list[Card]] = {}
    for card in of:
        found.setdefault(card.alike, []).append(card)
    return sorted(found.values(), key=lambda group: (-len(group), group[0].name))


def differences(group: Sequence[Card]) -> dict[str, dict[str, list[str]]]:
    """What differs between cards: field -> value -> names of the cards."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in VARIES:
        values: dict[str, list[str]] = {}
        for card in group:
            values.setdefault(str(card.env.get(name)), []).append(card.name)
        if len(values) > 1:
            found[name] = values
    return found


def _add(card: Card, row: Mapping[Any, Any]) -> None:
    """One row; a later one of the same measurement replaces an earlier one, whether it failed or not."""
    key = (row["suite"], row["case_id"], row["arm"], row["metric"], row["regime"])
    resolved = json.loads(row["resolved"] or "{}")
    if isinstance(resolved, dict) and "checksum" in resolved:
        card.checksums[row["case_id"], row["arm"]] = str(resolved["checksum"])
    if row["metric"] not in TIMES:
        return
    for kept in (card.times, card.failed, card.clock_mhz, card.baselines):
        kept.pop(key, None)
    card.throttled.discard(key)
    if row["status"] == "failed":
        card.failed[key] = str(row["reason"])
    if row["status"] != "ok" or not (math.isfinite(row["value"]) and row["value"] > 0):
        return
    card.times[key], card.baselines[key] = float(row["value"]), str(row["baseline"] or "")
    clocks = sorted(c for c in row["sample_clock_mhz"] if math.isfinite(c))
    if clocks:
        card.clock_mhz[key] = float(clocks[len(clocks) // 2])
    timing = json.loads(row["timing"] or "{}")
    if isinstance(timing, dict) and timing.get("throttled") is True:
        card.throttled.add(key)


def _name(env: Mapping[str, Any]) -> str:
    host = str(env.get("host_hash") or "unknown")[:8]
    return f"{str(env['gpu_uuid_hash'])[:8]}@{host}" if env.get("gpu_uuid_hash") else f"host {host}"


def _model(env: Mapping[str, Any]) -> str:
    if env.get("gpu"):
        return f"{env['gpu']}, {env.get('gpu_memory_gib')} GiB"
    return f"CPU {env.get('cpu') or 'model unknown'}"
