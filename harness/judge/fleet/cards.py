"""Cards: the rows of many machines by the GPU that made them, and the cards that may be set side by side.

A card is a GPU of a host, both known by a hash (`gpu_uuid_hash`, `host_hash`); where a run was measured on a CPU, the
host is the card. Cards are alike if model, software and code agree, and what one GPU measured with two torches or two
states of the code counts as two. Power limit, driver and what else may differ between cards that are alike are
differences to be listed: they explain an outlier and do not excuse it.

Of a case that a card measured several times the newest attempt counts, whole. Results are another matter: a card that
was wrong once has been wrong, so what contradicts it later does not replace it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.store import differences as environments
from harness.store.arm import arm_of
from harness.store.cause import REFUTED
from harness.store.compare import TIMES
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas as pd

Key = tuple[str, str, str, str, str]  # suite, case id, arm, metric, regime
ArmKey = tuple[str, str, str]  # suite, case id, arm: rows of an arm that never ran have no regime

CHECKSUM = "checksum"  # the suite whose results are compared by their bits
# What decides how fast code is, or which kernel runs: cards that differ here are not compared
SOFTWARE = ("torch", "triton", "cuda", "hip", "cublas", "cudnn", "torchao", "threads", "gpu_sm_count")
# What may differ between cards that are
VARIES = ("driver", "power_limit_w", "max_sm_clock_mhz", "ecc", "git_commit", "git_dirty", "os", "python")


@dataclass
class Card:
    """One GPU of one host and what it measured with one software.

    Attributes:
        name: short, the same in every report of this card.
        model: of the GPU, or of the CPU.
        env: of its newest row.
        times: milliseconds (median of the samples) by measurement.
        baselines: the arm that each arm is compared with.
        clock_mhz: middle SM clock by measurement, where it could be read.
        throttled: the measurements during which the GPU throttled.
        failed: reason of each arm that failed, in any regime.
        checksums: of the suite `checksum`: all that a case and arm ever gave.
        wrong: why a result is wrong whatever others give, by case and arm: it is not the exact product, or not the
            one that the card gave a moment before.
    """

    name: str
    model: str
    env: Mapping[str, Any]
    times: dict[Key, float] = field(default_factory=dict)
    baselines: dict[Key, str] = field(default_factory=dict)
    clock_mhz: dict[Key, float] = field(default_factory=dict)
    throttled: set[Key] = field(default_factory=set)
    failed: dict[ArmKey, str] = field(default_factory=dict)
    checksums: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    wrong: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def alike(self) -> tuple[str, ...]:
        """What a card must share to be compared with this one."""
        return alike(self.env)

    @property
    def runs(self) -> set[ArmKey]:
        """The arms that have a time and failed in no regime."""
        return {(suite, case, arm) for suite, case, arm, *_ in self.times} - self.failed.keys()


def cards(frame: pd.DataFrame) -> list[Card]:
    """The cards of some rows, by name.

    Args:
        frame: rows of the store with all attempts: cards that were given one run id must not replace each other.
    """
    found: dict[tuple[str, ...], Card] = {}
    envs = {text: parse(text) for text in frame["env"].unique()}
    rows = [r for r in frame.sort_values("attempt", kind="stable").to_dict("records") if not _again(r)]
    newest = {(*_key(envs[r["env"]]), r["case_id"]): r["attempt"] for r in rows if r["status"] != "skipped"}
    for row in rows:
        env = envs[row["env"]]
        key = _key(env)
        card = found.setdefault(key, Card(card_name(env), _model(env), env))
        card.env = env
        _add_result(card, row)
        # What was skipped does not replace what was measured.
        if row["attempt"] == newest.get((*key, row["case_id"])):
            _add_time(card, row)
    return [found[key] for key in sorted(found)]


def card_name(env: Mapping[str, Any]) -> str:
    """The short name of the GPU of an environment, or of its host where there is none."""
    host = str(env.get("host_hash") or "unknown")[:8]
    return f"{str(env['gpu_uuid_hash'])[:8]}@{host}" if env.get("gpu_uuid_hash") else f"host {host}"


def groups(of: Iterable[Card]) -> list[list[Card]]:
    """Cards that may be compared, the largest group first."""
    found: dict[tuple[str, ...], list[Card]] = {}
    for card in of:
        found.setdefault(card.alike, []).append(card)
    return sorted(found.values(), key=lambda group: (-len(group), group[0].name))


def differences(group: Sequence[Card]) -> dict[str, dict[str, list[str]]]:
    """What differs between cards: field -> value -> names of the cards."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, seen in environments.differences([card.env for card in group], VARIES).items():
        values: dict[str, list[str]] = {}
        for card, value in zip(group, seen, strict=True):
            values.setdefault(str(value), []).append(card.name)
        found[name] = values
    return found


def _again(row: Mapping[Any, Any]) -> bool:
    """Whether a row is of the second timing of a baseline."""
    return arm_of(row).control


def _add_result(card: Card, row: Mapping[Any, Any]) -> None:
    """What a row of the suite `checksum` says of the bits; a result that is known to be wrong is no vote."""
    if row["suite"] != CHECKSUM:
        return
    key = (row["case_id"], row["arm"])
    if _is_wrong(row):
        card.wrong[key] = str(row["reason"])
        return
    resolved = parse(row["resolved"])
    if "checksum" in resolved:
        card.checksums.setdefault(key, set()).add(str(resolved["checksum"]))


def _is_wrong(row: Mapping[Any, Any]) -> bool:
    """Whether the check of a product refuted it; anything else that fails is a failure like those of other suites."""
    return bool(row["suite"] == CHECKSUM and row["status"] == "failed" and row["cause"] in REFUTED)


def _add_time(card: Card, row: Mapping[Any, Any]) -> None:
    """One row of the newest attempt of its case."""
    if row["metric"] not in TIMES or _is_wrong(row):
        return
    key = (row["suite"], row["case_id"], row["arm"], row["metric"], row["regime"])
    if row["status"] == "failed":
        card.failed[row["suite"], row["case_id"], row["arm"]] = str(row["reason"])
    if row["status"] != "ok" or not (math.isfinite(row["value"]) and row["value"] > 0):
        return
    card.times[key], card.baselines[key] = float(row["value"]), str(row["baseline"] or "")
    clocks = sorted(c for c in row["sample_clock_mhz"] if math.isfinite(c))
    if clocks:
        card.clock_mhz[key] = float(clocks[len(clocks) // 2])
    if parse(row["timing"]).get("throttled") is True:
        card.throttled.add(key)


def _key(env: Mapping[str, Any]) -> tuple[str, ...]:
    return (card_name(env), *alike(env))


def alike(env: Mapping[str, Any]) -> tuple[str, ...]:
    """What rows must share to be compared: model, software, code, MIG."""
    # Rows of before the code was hashed have its commit. MIG counts as off where it could not be asked for: a slice has
    # fewer multiprocessors and less memory than its card.
    code = env.get("code") or env.get("git_commit")
    return (_model(env), *(str(env.get(name)) for name in SOFTWARE), str(code), str(bool(env.get("mig"))))


def _model(env: Mapping[str, Any]) -> str:
    if env.get("gpu"):
        return f"{env['gpu']}, {env.get('gpu_memory_gib')} GiB"
    return f"CPU {env.get('cpu') or 'model unknown'}"
