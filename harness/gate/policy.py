"""Policy: what the gate tolerates, from YAML. `policy.yaml` beside this file is the default and documents each key."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from harness.store.errors import UsageError, unknown
from harness.store.measurement import METRICS
from harness.store.outside import checked_yaml

BetterWhen = Literal["lower", "higher"]
RuleName = Literal["timed", "exact", "numerics", "ignore"]
Condition = Literal["contended", "throttled"]  # under which a row may have been measured
CONDITIONS = get_args(Condition)
DEFAULT = Path(__file__).with_name("policy.yaml")
MEASURING = ("pairs", "confirm_pairs", "blocks", "budget_s")  # what says how to measure


@dataclass(frozen=True, slots=True)
class MetricRule:
    """How one metric is judged: a share, and for exact rules an amount in the metric's unit."""

    rule: RuleName
    tolerance: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True, slots=True)
class Match:
    """Globs by field of a unit."""

    suite: str = "*"
    arm: str = "*"
    metric: str = "*"
    regime: str = "*"
    part: str = "*"
    case: str = "*"

    def fits(self, unit: Mapping[str, str]) -> bool:
        """Whether a unit, given by its fields, matches every glob."""
        return all(fnmatchcase(unit.get(f.name, ""), getattr(self, f.name)) for f in fields(self))


@dataclass(frozen=True, slots=True)
class CaseGroup:
    """Cases with a tolerance of their own."""

    tolerance: float
    name: str = "unnamed"
    match: Match = Match()


@dataclass(frozen=True, slots=True)
class Allowance:
    """A known regression, tolerated until `until`."""

    match: Match
    until: datetime.date
    reason: str

    def __post_init__(self) -> None:
        if self.match == Match():
            raise UsageError(f"the allowance until {self.until} matches everything; restrict it with match")


@dataclass(frozen=True)
class Policy:
    """A whole policy; the fields are the keys of the file."""

    metrics: Mapping[str, MetricRule] = field(default_factory=dict)
    units: Mapping[str, MetricRule] = field(default_factory=dict)
    facts: Mapping[str, BetterWhen] = field(default_factory=dict)
    groups: tuple[CaseGroup, ...] = ()
    allow: tuple[Allowance, ...] = ()
    alpha: float = 0.05
    alpha_confirm: float = 0.01
    control: float = 0.015
    session_spread: float = 0.02
    scatter: float = 0.04
    on_inconclusive: Literal["warn", "share", "fail"] = "share"
    undecided_share: float = 0.2
    exclude: tuple[Condition, ...] = CONDITIONS
    on_slower: Literal["warn", "fail"] = "fail"
    pairs: int = 10
    blocks: int = 12
    confirm_pairs: int = 10
    budget_s: float = 300.0

    def rule_for(self, unit: Mapping[str, str]) -> MetricRule:
        """The rule of a unit, its group's tolerance included."""
        name = unit["metric"]
        metric = METRICS.get(name)
        by_unit = None if metric is None or metric.better == "none" else self.units.get(metric.unit)
        rule = self.metrics.get(name) or by_unit
        if rule is None:
            return MetricRule("ignore")
        for group in self.groups:
            if group.match.fits(unit):
                return replace(rule, tolerance=group.tolerance)
        return rule

    def allowance(self, unit: Mapping[str, str]) -> Allowance | None:
        """The first allowance that covers a unit, expired or not; one that still holds goes before."""
        fitting = [a for a in self.allow if a.match.fits(unit)]
        return max(fitting, key=lambda a: a.until, default=None)


def as_given(policy: Policy, options: object) -> Policy:
    """A policy with what a command line says about measuring: the attributes of `MEASURING` that it has."""
    given = {name: getattr(options, name, None) for name in MEASURING}
    return replace(policy, **{name: value for name, value in given.items() if value is not None})


def load_policy(path: Path | None = None, default: Path = DEFAULT) -> Policy:
    """The default policy, with what a file says put over it.

    Raises:
        UsageError: the file can't be read, names a key, metric, rule or field that is unknown, or holds a value out
            of range.
    """
    policy = _over(Policy(), default, default.name)
    return policy if path is None else _over(policy, path, str(path))


def _over(policy: Policy, path: Path, where: str) -> Policy:
    try:
        content = yaml.safe_load(checked_yaml(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the policy {path}: {' '.join(str(error).split())}") from error
    try:
        changes = _fields(Policy, content or {}, "key of the policy")
        for name, known in (("metrics", METRICS), ("units", {metric.unit for metric in METRICS.values()})):
            if strange := [key for key in changes.get(name, {}) if key not in known]:
                raise unknown(name.removesuffix("s"), strange[0], known)
            changes[name] = {**getattr(policy, name), **changes.get(name, {})}
    except UsageError as error:
        raise UsageError(f"policy {where}: {error}") from error
    return replace(policy, **changes)


def _fields(kind: type, value: Any, what: str = "key") -> dict[str, Any]:
    """The entries of a mapping as fields of a dataclass, each read by its annotation."""
    types = get_type_hints(kind)
    entries = _entries(value)
    if strange := [name for name in entries if name not in types]:
        raise unknown(what, strange[0], types)
    return {name: _read(types[name], entry, name) for name, entry in entries.items()}


def _entries(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{value!r} must be a mapping of keys")
    return {str(key): entry for key, entry in value.items()}


def _read(kind: Any, value: Any, name: str) -> Any:
    """A value of a policy, by the annotation of its field; an error names its entry."""
    try:
        return _value(kind, value, name)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error


def _value(kind: Any, value: Any, name: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        given = _fields(kind, value)  # type: ignore[arg-type]
        if lacking := [f.name for f in fields(kind) if f.default is MISSING and f.name not in given]:
            raise UsageError(f"an entry lacks {lacking[0]!r}: {value!r}")
        return kind(**given)  # type: ignore[operator]
    if origin is Mapping:
        return {key: _read(inner[1], entry, key) for key, entry in _entries(value).items()}
    if origin is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{value!r} must be a list")
        return tuple(_value(inner[0], entry, name) for entry in value)
    is_number = type(value) in (int, float) and 0 <= value < math.inf
    fits, wanted = {
        int: (type(value) is int and value >= 1, "a whole number of at least 1"),
        float: (is_number, "a number of at least 0"),
        datetime.date: (type(value) is datetime.date, "a date such as 2027-01-31"),
        str: (isinstance(value, str) and value.strip(), "a text"),
    }.get(kind, (value in inner, f"one of {', '.join(inner)}"))
    if fits and name.startswith("alpha"):
        fits, wanted = 0 < value < 0.5, "a number between 0 and 0.5"
    if not fits:
        raise UsageError(f"{value!r} must be {wanted}")
    return value
