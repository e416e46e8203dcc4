"""Configuration: Hydra composes, the harness expands. The only file that knows Hydra.

Every `sweeps/*.yaml` is an option of the group `sweep`; its first comment line is the question it answers. A
command line is `sweep=NAME key=value ...`. Keys are checked against `harness.engine.settings`, so a typo is refused
with the nearest key. Axes are the one open place: `axes.NAME=...` is taken as it is and the suite checks it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)

from harness.engine.settings import PartConfig, SweepConfig, TrainConfig
from harness.store.errors import UsageError, unknown
from harness.store.outside import checked_yaml
from harness.store.text import own_model
from harness.suites import SUITES
from harness.timing.config import TimingConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


def refuse_unknown(config: Mapping[str, Any]) -> None:
    """Refuse an axis that no suite of the sweep has.

    Args:
        config: plain values of `harness.engine.settings.SweepConfig`; interpolations need not be resolved, and are not judged.

    Raises:
        UsageError: names the axis and the nearest one.
    """
    parts = config["parts"]
    if not isinstance(parts, dict) or not all(isinstance(part, dict) for part in parts.values()):
        return  # an interpolation
    known = [_known(part) for part in parts.values()]
    for part, names in zip(parts.values(), known, strict=True):
        _refuse(part["axes"], names)
    every = None if None in known else {name for names in known for name in names or ()}
    _refuse(config["axes"], every if parts else _known(config))  # those of the whole sweep belong to any part


def _known(part: Mapping[str, Any]) -> Collection[str] | None:
    """The axes of a part's suite; None where only importing it, or resolving its name, tells them."""
    return SUITES.axis_names(part["suite"]) if isinstance(part["suite"], str) else None


def _refuse(axes: Any, known: Collection[str] | None) -> None:
    if known is None or not isinstance(axes, dict):
        return
    for axis, values in axes.items():
        if values is not None and axis not in known:  # null unsets what another sweep has set
            raise unknown("axis", axis, known)


# Of the same keys and kinds as TimingConfig, and not frozen, so that Hydra may change it
_KINDS = {"int": int, "float": float}
_FIELDS = [(f.name, _KINDS[f.type], field(default=f.default)) for f in dataclasses.fields(TimingConfig)]  # type: ignore[index]
TimingKeys = dataclasses.make_dataclass("TimingKeys", _FIELDS)


@dataclass
class Composed(SweepConfig):
    """What Hydra composes."""

    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"sweep": "???"}])
    timing: Any = field(default_factory=TimingKeys)


KEYS = tuple({f.name for f in dataclasses.fields(SweepConfig)} - {"name", "question"})


@dataclass(frozen=True)
class Request:
    """A composed command line, without Hydra's types."""

    config: SweepConfig
    timing: TimingConfig
    overrides: tuple[str, ...]


def sweep_folders(own: str | None = None) -> list[Path]:
    """Where sweeps come from: those of the project, then `./sweeps` of the current folder, then a folder of one's own."""
    beside = Path(__file__).parents[2] / "sweeps"  # an editable install
    inside = Path(__file__).parents[1] / "sweeps"  # an installed wheel
    return [inside, beside, Path.cwd() / "sweeps", *([Path(own)] if own else [])]


def sweeps(own: str | None = None) -> dict[str, Path]:
    """Every sweep by name; of equal names that of the last folder."""
    return {path.stem: path for folder in sweep_folders(own) for path in sorted(folder.glob("*.yaml"))}


def question(path: Path) -> str:
    """The first comment line of a sweep file."""
    with path.open() as file:
        first = file.readline()
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def load_request(words: Sequence[str], resolve_device: Callable[[str], str]) -> Request:
    """The request of a command line; one that names a run and no sweep takes all settings from that run.

    Args:
        words: `key=value`.
        resolve_device: see `load`.

    Raises:
        UsageError: see `load` and `harness.cli.resume_alone.continued`.
    """
    given = {key_of(word): word.partition("=")[2] for word in words}
    if "sweep" in given or given.get("resume", "null").strip("'\"") == "null":
        return load(words, resolve_device)
    from harness.cli.resume_alone import continued  # which composes by this module

    return continued(words, given, resolve_device)


def key_of(word: str) -> str:
    """The key of a word `key=value`."""
    return word.lstrip("+").partition("=")[0]


def load(overrides: Sequence[str], resolve_device: Callable[[str], str]) -> Request:
    """Composes a command line into plain values.

    Args:
        overrides: `key=value` words, `sweep=NAME` among them.
        resolve_device: turns "auto" into "cpu" or "cuda"; called once, after the command line has been checked.

    Raises:
        UsageError: an unknown sweep, key or value; one line, with the nearest name.
    """
    literal, words = _split_literal([_normalise(word) for word in overrides])
    known = sweeps(literal.get("config_dir"))
    chosen = [word.partition("=")[2] for word in words if word.partition("=")[0] == "sweep"]
    if len(chosen) != 1:
        raise UsageError(
            f"one sweep=NAME is needed, got {len(chosen)}; known: {', '.join(sorted(known))}; resume=RUN_ID alone has its own"
        )
    if "," in chosen[0]:
        raise UsageError(f"sweep={chosen[0]}: several runs are python -m harness -m sweep={chosen[0]}")
    if chosen[0] not in known:
        raise unknown("sweep", chosen[0], known)
    # Hydra prints to the screen and drops the cause unless this is set.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        _register(chosen[0], known)
        GlobalHydra.instance().clear()
        with initialize(version_base="1.3", config_path=None):
            composed = compose("harness", overrides=words)
        unresolved: Any = OmegaConf.to_container(composed, resolve=False, throw_on_missing=False)
        refuse_unknown(unresolved)
        device = resolve_device(str(composed.device))
        OmegaConf.register_new_resolver(
            "on_device", lambda cpu, gpu: gpu if device == "cuda" else cpu, replace=True
        )
        plain: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    except OverrideParseException as error:
        raise UsageError(f"cannot read {error.override!r}: {_first_line(error)}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_in_our_words(error, words, chosen[0])) from error
    plain |= {"device": device, **literal}
    if "run_id" in {word.partition("=")[0] for word in words} | literal.keys() and "resume" not in literal:
        plain["resume"] = None  # the sweep's own default gives way
    if abs(plain["seed"]) > SEED_MAX:
        raise UsageError(
            f"seed={plain['seed']}: expected an integer from -{SEED_MAX} to {SEED_MAX}; each case draws from 1000 times as many"
        )
    if plain["dry_run"] and plain["config_dir"] and not plain["trust"] and _calls(plain):
        raise UsageError(
            f"sweep={chosen[0]} of {plain['config_dir']} names code (_target_), which a dry run would call; read it, then add "
            "trust=true"
        )
    named = plain["model"]
    if isinstance(named, str) and any(word.startswith("model=") for word in overrides):
        plain["model"] = _sizes_of(named)
    budget = plain["budget_s"]
    if budget is not None and not (math.isfinite(budget) and budget >= 0):
        raise UsageError(
            f"budget_s={budget:g}: expected a finite number of seconds from 0; null sets no limit"
        )
    if plain["log_level"].upper() not in LOG_LEVELS:
        raise UsageError(f"log_level={plain['log_level']}: expected one of {', '.join(LOG_LEVELS)}")
    timing = timing_of(plain)
    return Request(SweepConfig.of(plain), timing, tuple(overrides))


def _sizes_of(model: str) -> Any:
    """A model of a `config.json` as what builds it, so that rows hold its sizes and no path; any other name as it is.

    Only of the command line: a stranger's sweep file would else name a file whose contents are stored.
    """
    from harness.training.models import MODELS  # torch
    from harness.training.models.hugging_face import as_values, is_config

    return as_values(model) if model not in MODELS and is_config(model) else model


# Paths, names and a schedule of a command line.
LITERAL = {
    "results_dir",
    "reports_dir",
    "resume",
    "run_id",
    "data_path",
    "ceilings",
    "schedule",
    "devices",
    "config_dir",
}
SEED_MAX = (
    2**53
)  # suites seed their generators, of 64 bits, with 1000 times as much (`suites.common.generator`)
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_EXPECTED = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text"}


def _in_our_words(error: Exception, words: Sequence[str], sweep: str) -> str:
    """Message for what Hydra or OmegaConf refused: the word at fault and what is expected."""
    cause: BaseException = error
    while not isinstance(cause, OmegaConfBaseException) and (below := cause.__cause__ or cause.__context__):
        cause = below
    message, merged = _first_line(cause), _first_line(error)
    for word in words:
        key = key_of(word)
        if "Ambiguous value" in merged and word in merged:
            return f"{word.lstrip('+')}: a list is written in brackets, use key=[value1,value2]"
        if (
            merged == f"Error merging override {word}"
            and isinstance(cause, ValidationError)
            and cause.full_key == key
        ):
            return f"{word.lstrip('+')}: expected {_expected_of(key)}"
        if merged.startswith((f"Could not override '{key}'", f"Error merging override {word}")):
            return f"unknown key {key!r}: sweep {sweep!r} has none of that name to set"
    if isinstance(cause, InterpolationResolutionError):
        return (
            f"{cause.full_key}: nothing to fill in for ${{...}}: {message.rpartition('interpolation: ')[2]}"
        )
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"sweep {sweep!r}: unknown key {cause.full_key!r}"
    if isinstance(cause, ValidationError) and cause.full_key:
        return f"sweep {sweep!r}: {cause.full_key}: expected {_expected_of(str(cause.full_key))}"
    return f"sweep {sweep!r}: {message}"


def _expected_of(key: str) -> str:
    """What the configuration takes as value of a key."""
    path = key.split(".")
    owner = {"train": TrainConfig, "timing": TimingConfig}.get(path[0]) if path[1:] else SweepConfig
    owner = owner or PartConfig
    kind = {f.name: str(f.type) for f in dataclasses.fields(owner)}.get(path[-1], "")
    if kind.startswith("list"):
        return f"a list: {key}=[NAME,NAME]"
    named, _, none = kind.partition(" | ")
    if named not in _EXPECTED:
        return f"the names below it one by one: {key}.NAME=VALUE"
    return _EXPECTED[named] + (", or null" if none else "")


def _register(chosen: str, known: dict[str, Path]) -> None:
    """Registers a sweep and those that it extends with Hydra. The others are not read: parsing all takes 0.2 s."""
    store = ConfigStore.instance()
    store.store(name="harness", node=Composed)
    waiting, registered = [chosen], set()
    while waiting:
        name = waiting.pop()
        registered.add(name)
        try:
            node: Any = OmegaConf.create(checked_yaml(known[name]))
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            raise UsageError(f"cannot read {known[name]}: {' '.join(str(error).split())}") from error
        bases = node.get("defaults", [])
        # Another form of Hydra's, such as {/sweep: NAME}, may mean any of them.
        plain = all(isinstance(base, str) and (base == "_self_" or base in known) for base in bases)
        waiting += [
            base for base in (bases if plain else known) if base not in {"_self_", *registered, *waiting}
        ]
        # The sweep's own values win over what it extends, so name and question are set here.
        node["name"] = name
        node["question"] = question(known[name])
        given: Any = OmegaConf.to_container(node, resolve=False)
        _refuse_reading([v for k, v in given.items() if str(k).partition(".")[0] != "hydra"], known[name])
        store.store(group="sweep", name=name, node=node, package="_global_")


# What a sweep's file may fill in: another key, or a value by the device. A resolver such as oc.env reads the machine of
# whoever runs the file; what it reads would be stored and published, wherever another key takes it over.
_FILLED_IN = re.compile(r"\$\{(?!on_device:|[\w.\[\]]+\})")


def _refuse_reading(value: Any, path: Path) -> None:
    """Refuses a text of a sweep's file that reads what is not in the file."""
    if isinstance(value, str) and (found := _FILLED_IN.search(value)):
        raise UsageError(
            f"{path}: {value[found.start() :][:60]!r} reads the machine, which the command line alone may; write the value"
        )
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_reading(each, path)


def _calls(value: Any) -> bool:
    """Whether settings name code that is called: a key `_target_`, also within the text of a model."""
    value = own_model(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        return any(str(key).endswith("_target_") or _calls(each) for key, each in value.items())
    return isinstance(value, list) and any(map(_calls, value))


def _normalise(word: str) -> str:
    """Checks the key of one override against the configuration, and lets axes that are new to the file through."""
    key, equals, value = word.lstrip("+").partition("=")
    if key.startswith("~") and not equals:
        if key.startswith(("~axes.", "~parts.")):
            return word
        raise UsageError(
            f"{word!r}: left out can be ~axes.NAME and ~parts.NAME alone; an empty list takes all: arms=[]"
        )
    if not equals or key.startswith("~"):
        raise UsageError(f"{word!r} is not key=value")
    root, *rest = key.split(".")
    if root.startswith("hydra/") or (key == "shard" and "," in value):
        raise UsageError(f"{word} spreads a sweep over several processes: write python -m harness -m ...")
    if not (root == "hydra" and rest):
        _refuse_unknown(key)
    if key == "cases":  # an id of digits alone, or one like 12e4567, is a text and no number
        ids = (name.strip(" '\"") for name in value.strip("[] ").split(","))
        return "cases=[" + ",".join(f"'{name}'" for name in ids if name) + "]"
    inside = rest[1:] if root == "parts" else [root, *rest]
    return "++" + word.lstrip("+") if root == "model" or inside[:1] == ["axes"] else word


def _refuse_unknown(key: str) -> None:
    """Refuses a key that the dataclasses have not, by the nearest that they have."""
    names, above = {*KEYS, "sweep"}, ""
    for name in key.split("."):
        if name not in names:
            # `M=512` is the most likely slip; axes are written axes.M.
            if not above and (len(key) == 1 or key in {"tokens", "dtype", "granularity", "bytes"}):
                raise UsageError(f"unknown key {key!r}; an axis is written axes.{key}=...")
            raise unknown("key", key, (above + each for each in names))
        below = {"timing": TimingConfig, "train": TrainConfig}.get(name) if not above else None
        if below is None:
            return
        names, above = {f.name for f in dataclasses.fields(below)}, f"{name}."


def _split_literal(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Keys whose value is taken as it stands, since a path may hold what Hydra and OmegaConf read otherwise; other words."""
    literal: dict[str, str] = {}
    others = []
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        path = key in LITERAL or (key == "model" and "/" in value and value[:1] not in {"[", "{"})
        if path and value != "null" and value[:1] not in {"'", '"'}:
            literal[key] = value
        else:
            others.append(word)
    return literal, others


def timing_of(plain: dict[str, Any]) -> TimingConfig:
    """Timing of a composed configuration; `rounds` sets both ends of its range.

    Raises:
        UsageError: a value that is no number, or out of range.
    """
    values = dict(plain["timing"])
    if plain["rounds"] is not None:
        values["min_rounds"] = values["max_rounds"] = plain["rounds"]
    try:
        return TimingConfig(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(f"timing: {error}") from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def command_line(overrides: Sequence[str]) -> str:
    """The command that repeats this run."""
    return shlex.join(["python", "-m", "harness", *overrides])
