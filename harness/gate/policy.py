"""Policy: what the gate tolerates, from YAML. `policy.yaml` beside this file is the default and documents each key."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from harness.store.errors import UsageError, unknown
from harness.store.measurement import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable

Better = Literal["lower", "higher"]
RuleName = Literal["timed", "exact", "numerics", "ignore"]
RULES: tuple[RuleName, ...] = ("timed", "exact", "numerics", "ignore")
MATCH_FIELDS = ("suite", "arm", "metric", "regime", "part", "case")
CONDITIONS = ("contended", "throttled")  # under which a row may have been measured
DEFAULT = Path(__file__).with_name("policy.yaml")
MEASURING = ("pairs", "confirm_pairs", "blocks", "budget_s")  # what says how to measure


@dataclass(frozen=True, slots=True)
class Rule:
    """How one metric is judged: a share, and for exact rules an amount in the metric's unit."""

    rule: RuleName
    tolerance: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True, slots=True)
class Match:
    """Globs by field; an empty one matches everything."""

    globs: tuple[tuple[str, str], ...] = ()

    def fits(self, unit: Mapping[str, str]) -> bool:
        """Whether a unit, given by its fields, matches every glob."""
        return all(fnmatchcase(unit.get(name, ""), glob) for name, glob in self.globs)


@dataclass(frozen=True, slots=True)
class Group:
    """Cases with a tolerance of their own; `together` judges their mean as well."""

    name: str
    match: Match
    tolerance: float | None = None
    together: bool = False


@dataclass(frozen=True, slots=True)
class Allowance:
    """A known regression, tolerated until `until`."""

    match: Match
    until: datetime.date
    reason: str


@dataclass(frozen=True)
class Policy:
    """A whole policy; the fields are the keys of the file."""

    metrics: Mapping[str, Rule] = field(default_factory=dict)
    units: Mapping[str, Rule] = field(default_factory=dict)
    facts: Mapping[str, Better] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    allow: tuple[Allowance, ...] = ()
    alpha: float = 0.05
    alpha_confirm: float = 0.01
    control: float = 0.015
    session_spread: float = 0.02
    scatter: float = 0.04
    on_inconclusive: Literal["warn", "share", "fail"] = "share"
    undecided_share: float = 0.2
    clock_stray: float = 0.05
    exclude: tuple[str, ...] = ("contended", "throttled")
    on_slower: Literal["warn", "fail"] = "fail"
    pairs: int = 10
    blocks: int = 12
    confirm_pairs: int = 10
    budget_s: float = 300.0

    def rule_for(self, unit: Mapping[str, str]) -> Rule:
        """The rule of a unit, its group's tolerance included."""
        metric = METRICS.get(unit["metric"])
        if unit["metric"] in self.metrics:
            rule = self.metrics[unit["metric"]]
        elif metric is None or metric.better == "none":
            return Rule("ignore")
        else:
            rule = self.units.get(metric.unit, Rule("ignore"))
        for group in self.groups:
            if group.tolerance is not None and group.match.fits(unit):
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
    policy = _over(Policy(), _read(default), default.name)
    return policy if path is None else _over(policy, _read(path), str(path))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the policy {path}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise UsageError(f"the policy {path} must be a mapping of keys, it is a {type(content).__name__}")
    return content


def _over(policy: Policy, content: Mapping[str, Any], where: str) -> Policy:
    known = [f.name for f in fields(Policy)]
    changes: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            raise unknown(f"key of the policy {where}", str(key), known)
        try:
            changes[key] = _value(policy, key, value)
        except UsageError as error:
            raise UsageError(f"policy {where}, {key}: {error}") from error
    return replace(policy, **changes)


def _value(policy: Policy, key: str, value: Any) -> Any:
    if key in ("metrics", "units"):
        table = {str(name): _rule(name, rule) for name, rule in _mapping(value).items()}
        known = METRICS if key == "metrics" else sorted({metric.unit for metric in METRICS.values()})
        for name in table:
            if name not in known:
                raise unknown(key.removesuffix("s"), name, known)
        return {**getattr(policy, key), **table}
    if key == "facts":
        return {str(name): _better(name, side) for name, side in _mapping(value).items()}
    if key == "groups":
        return tuple(_group(entry) for entry in _list(value))
    if key == "allow":
        return tuple(_allowance(entry) for entry in _list(value))
    if key in ("on_inconclusive", "on_slower"):
        words = ("warn", "share", "fail") if key == "on_inconclusive" else ("warn", "fail")
        if value not in words:
            raise UsageError(f"{value!r} must be {', '.join(words[:-1])} or {words[-1]}")
        return value
    if key == "exclude":
        for name in (names := [str(name) for name in _list(value)]):
            if name not in CONDITIONS:
                raise unknown("condition", name, CONDITIONS)
        return tuple(names)
    if key in ("pairs", "blocks", "confirm_pairs"):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{value!r} must be a whole number of at least 1")
        return value
    share = _share(value)
    if key == "budget_s":
        return share
    if key.startswith("alpha") and not 0 < share < 0.5:
        raise UsageError(f"{value!r} must lie between 0 and 0.5")
    return share


def _better(name: object, value: Any) -> Better:
    if value == "lower":
        return "lower"
    if value == "higher":
        return "higher"
    raise UsageError(f"{name}: {value!r} must be lower or higher: the direction that is better")


def _rule(name: object, value: Any) -> Rule:
    entries = _keys(value, ("rule", "tolerance", "absolute"))
    if entries.get("rule") not in RULES:
        raise UsageError(f"{name}: rule {entries.get('rule')!r} must be one of {', '.join(RULES)}")
    return Rule(entries["rule"], _share(entries.get("tolerance", 0.0)), _share(entries.get("absolute", 0.0)))


def _group(value: Any) -> Group:
    entries = _keys(value, ("name", "match", "tolerance", "together"))
    tolerance = entries.get("tolerance")
    return Group(
        name=str(entries.get("name") or "unnamed"),
        match=_match(entries.get("match")),
        tolerance=None if tolerance is None else _share(tolerance),
        together=entries.get("together") is True,
    )


def _allowance(value: Any) -> Allowance:
    entries = _keys(value, ("match", "until", "reason"))
    until, reason = entries.get("until"), entries.get("reason")
    if not isinstance(until, datetime.date) or isinstance(until, datetime.datetime):
        raise UsageError(f"until={until!r} must be a date such as 2027-01-31; an allowance needs an end date")
    if not isinstance(reason, str) or not reason.strip():
        raise UsageError(f"an allowance until {until} needs a reason")
    match = _match(entries.get("match"))
    if not match.globs:
        raise UsageError(f"the allowance until {until} matches everything; restrict it with match")
    return Allowance(match, until, reason.strip())


def _match(value: Any) -> Match:
    return Match(tuple((name, str(glob)) for name, glob in _keys(value or {}, MATCH_FIELDS).items()))


def _keys(value: Any, known: Iterable[str]) -> dict[str, Any]:
    entries = _mapping(value)
    for key in entries:
        if key not in known:
            raise unknown("key", str(key), known)
    return dict(entries)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{value!r} must be a mapping")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{value!r} must be a list")
    return value


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise UsageError(f"{value!r} must be a number of at least 0")
    return float(value)
