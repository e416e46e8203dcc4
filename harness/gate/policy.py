"""Policy: what the gate tolerates, from YAML. `policy.yaml` beside this file is the default and documents each key."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from harness.store.errors import UsageError, unknown
from harness.store.measurement import METRICS
from harness.store.outside import checked_yaml

Better = Literal["lower", "higher"]
RuleName = Literal["timed", "exact", "numerics", "ignore"]
Open = Literal["warn", "share", "fail"]
Slower = Literal["warn", "fail"]
LITERALS = {"RuleName": RuleName, "Open": Open, "Slower": Slower}
MATCH_FIELDS = ("suite", "arm", "metric", "regime", "part", "case")
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

    name: str = "unnamed"
    match: Match = Match()
    tolerance: float | None = None
    together: bool = False


@dataclass(frozen=True, slots=True)
class Allowance:
    """A known regression, tolerated until `until`."""

    match: Match
    until: datetime.date
    reason: str

    def __post_init__(self) -> None:
        if not self.match.globs:
            raise UsageError(f"the allowance until {self.until} matches everything; restrict it with match")


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
    on_inconclusive: Open = "share"
    undecided_share: float = 0.2
    clock_stray: float = 0.05
    exclude: tuple[str, ...] = ("contended", "throttled")
    on_slower: Slower = "fail"
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
        content = yaml.safe_load(checked_yaml(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the policy {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping | None):
        raise UsageError(f"the policy {path} must be a mapping of keys, it is a {type(content).__name__}")
    try:
        changes = _fields(Policy, content or {}, f"key of the policy {where}")
    except UsageError as error:
        raise UsageError(f"policy {where}: {error}") from error
    for table in ("metrics", "units"):
        changes[table] = {**getattr(policy, table), **changes.get(table, {})}
    return replace(policy, **changes)


def _fields(kind: type, value: Any, what: str = "key") -> dict[str, Any]:
    """The entries of a mapping as fields of a dataclass, each read by its annotation."""
    types = {f.name: str(f.type) for f in fields(kind)}
    return _each(_known(value, types, what), lambda name, entry: _read(name, types[name], entry))


def _each(entries: Iterator[tuple[str, Any]], read: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Entries as read; an error names its entry."""
    found = {}
    for name, entry in entries:
        try:
            found[name] = read(name, entry)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
    return found


def _record(kind: type, value: Any) -> Any:
    given = _fields(kind, value)
    for f in fields(kind):
        if f.default is MISSING and f.name not in given:
            raise UsageError(f"an entry lacks {f.name!r}: {value!r}")
    return kind(**given)


def _read(name: str, kind: str, value: Any) -> Any:
    """A value of a policy, by the annotation of its field."""
    if kind.startswith("Mapping"):
        known = {"metrics": METRICS, "units": {metric.unit for metric in METRICS.values()}}.get(name)
        read = partial(_record, Rule) if known else partial(_word, Better)
        return _each(_known(value, known, name.removesuffix("s")), lambda _, entry: read(entry))
    if kind.startswith("tuple"):
        if not isinstance(value, list):
            raise UsageError(f"{value!r} must be a list")
        if name == "exclude":
            return tuple(key for key, _ in _known(dict.fromkeys(map(str, value)), CONDITIONS, "condition"))
        return tuple(_record(Group if name == "groups" else Allowance, entry) for entry in value)
    if kind == "Match":
        return Match(tuple((key, str(glob)) for key, glob in _known(value or {}, MATCH_FIELDS)))
    if value is None and kind.endswith("None"):
        return value
    if kind in LITERALS:
        return _word(LITERALS[kind], value)
    wrong = ""
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if kind == "int" and not (type(value) is int and value >= 1):
        wrong = "a whole number of at least 1"
    elif kind.startswith("float") and not (number and 0 <= value < math.inf):
        wrong = "a number of at least 0"
    elif name.startswith("alpha") and not 0 < value < 0.5:
        wrong = "a number between 0 and 0.5"
    elif kind == "datetime.date" and type(value) is not datetime.date:
        wrong = "a date such as 2027-01-31"
    elif kind == "str" and not (isinstance(value, str) and value.strip()):
        wrong = "a text"
    elif kind == "bool" and not isinstance(value, bool):
        wrong = "true or false"
    if wrong:
        raise UsageError(f"{value!r} must be {wrong}")
    return value


def _known(value: Any, names: Collection[str] | None, kind: str = "key") -> Iterator[tuple[str, Any]]:
    """The entries of a mapping; a name that is not known is refused."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{value!r} must be a mapping")
    for name, entry in ((str(key), entry) for key, entry in value.items()):
        if names is not None and name not in names:
            raise unknown(kind, name, names)
        yield name, entry


def _word(words: Any, value: Any) -> Any:
    if value not in get_args(words):
        raise UsageError(f"{value!r} must be one of {', '.join(get_args(words))}")
    return value
