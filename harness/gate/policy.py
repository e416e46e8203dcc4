"""Policy: what the gate tolerates, from YAML. `policy.yaml` beside this file is the default and documents each key."""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from harness.store.errors import UsageError, unknown
from harness.store.measurement import METRICS

Better = Literal["lower", "higher"]
RuleName = Literal["timed", "exact", "numerics", "ignore"]
MATCH_FIELDS = ("suite", "arm", "metric", "regime", "part", "case")
WORDS = {"on_inconclusive": ("warn", "share", "fail"), "on_slower": ("warn", "fail")}
COUNTS = ("pairs", "blocks", "confirm_pairs")
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
        name = unit["metric"]
        metric = METRICS.get(name)
        by_unit = None if metric is None or metric.better == "none" else self.units.get(metric.unit)
        rule = self.metrics.get(name) or by_unit
        if rule is None:
            return Rule("ignore")
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
    policy = _over(Policy(), default, default.name)
    return policy if path is None else _over(policy, path, str(path))


def _over(policy: Policy, path: Path, where: str) -> Policy:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the policy {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping | None):
        raise UsageError(f"the policy {path} must be a mapping of keys, it is a {type(content).__name__}")
    changes: dict[str, Any] = {}
    for key, value in _known(content or {}, [f.name for f in fields(Policy)], f"key of the policy {where}"):
        try:
            changes[key] = _value(policy, key, value)
        except UsageError as error:
            raise UsageError(f"policy {where}, {key}: {error}") from error
    return replace(policy, **changes)


def _value(policy: Policy, key: str, value: Any) -> Any:
    if key == "metrics":
        return {**policy.metrics, **_rules(value, METRICS, "metric")}
    if key == "units":
        return {**policy.units, **_rules(value, {metric.unit for metric in METRICS.values()}, "unit")}
    if key == "facts":
        return {str(n): _word(v, get_args(Better), f"{n}: ") for n, v in _mapping(value).items()}
    if key == "groups":
        return tuple(_group(entry) for entry in _list(value))
    if key == "allow":
        return tuple(_allowance(entry) for entry in _list(value))
    if key in WORDS:
        return _word(value, WORDS[key])
    if key == "exclude":
        return tuple(name for name, _ in _known(dict.fromkeys(_list(value)), CONDITIONS, "condition"))
    if key in COUNTS:
        if type(value) is not int or value < 1:
            raise UsageError(f"{value!r} must be a whole number of at least 1")
        return value
    share = _number(value)
    if key.startswith("alpha") and not 0 < share < 0.5:
        raise UsageError(f"{value!r} must lie between 0 and 0.5")
    return share


def _rules(value: Any, names: Collection[str], kind: str) -> dict[str, Rule]:
    table = {}
    for name, entry in _known(value, names, kind):
        entries = dict(_known(entry, ("rule", "tolerance", "absolute")))
        if entries.get("rule") not in get_args(RuleName):
            rules = ", ".join(get_args(RuleName))
            raise UsageError(f"{name}: rule {entries.get('rule')!r} must be one of {rules}")
        amounts = (_number(entries.get(amount, 0.0)) for amount in ("tolerance", "absolute"))
        table[name] = Rule(entries["rule"], *amounts)
    return table


def _group(value: Any) -> Group:
    entries = dict(_known(value, [f.name for f in fields(Group)]))
    tolerance = entries.get("tolerance")
    return Group(
        str(entries.get("name") or "unnamed"),
        _match(entries),
        None if tolerance is None else _number(tolerance),
        entries.get("together") is True,
    )


def _allowance(value: Any) -> Allowance:
    entries = dict(_known(value, [f.name for f in fields(Allowance)]))
    until, reason, match = entries.get("until"), entries.get("reason"), _match(entries)
    if type(until) is not datetime.date:
        raise UsageError(f"until={until!r} must be a date such as 2027-01-31; an allowance needs an end date")
    if not isinstance(reason, str) or not reason.strip():
        raise UsageError(f"an allowance until {until} needs a reason")
    if not match.globs:
        raise UsageError(f"the allowance until {until} matches everything; restrict it with match")
    return Allowance(match, until, reason.strip())


def _match(entries: Mapping[str, Any]) -> Match:
    return Match(tuple((name, str(glob)) for name, glob in _known(entries.get("match") or {}, MATCH_FIELDS)))


def _known(value: Any, names: Iterable[str], kind: str = "key") -> Iterable[tuple[str, Any]]:
    """The entries of a mapping; a name that is not known is refused."""
    for name, entry in _mapping(value).items():
        if name not in names:
            raise unknown(kind, str(name), names)
        yield str(name), entry


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{value!r} must be a mapping")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{value!r} must be a list")
    return value


def _word(value: Any, words: Sequence[str], where: str = "") -> str:
    if value not in words:
        raise UsageError(f"{where}{value!r} must be {', '.join(words[:-1])} or {words[-1]}")
    return str(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UsageError(f"{value!r} must be a number of at least 0")
    return float(value)
