"""What there is to choose from: `python -m harness list ...`, and `sweep=NAME --help`. Read from the tables themselves."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.cli.config import question, sweeps
from harness.store.errors import UsageError, unknown
from harness.store.words import listed, options_of, word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fp8core.extensions import ExtensionTable
    from harness.engine.settings import PartConfig, SweepConfig
    from harness.timing.workload import Axis


@dataclass(frozen=True, slots=True)
class ListOptions:
    """python -m harness list: names that a command line takes, a line each
    python -m harness sweep=NAME --help has the axes and arms of one sweep
    """

    what: str = word("TABLE", "sweeps, models, gpus, recipes, extensions or arms")
    suite: str = word("SUITE", "of the arms", "")


def main(words: Sequence[str]) -> int:
    """Prints one table; exit code 0.

    Raises:
        UsageError: no such table or suite.
    """
    if (options := options_of(ListOptions, words or ["--help"])) is None:
        return 0
    tables = {**_TABLES, "arms": lambda: _arms(options.suite)}
    if options.what not in tables:
        raise unknown("table", options.what, tables)
    if options.suite and options.what != "arms":
        raise UsageError(f"list {options.what} takes no further word, got {options.suite!r}")
    sys.stdout.write(listed(tables[options.what]()))
    return 0


def sweep_help(config: SweepConfig) -> None:
    """Prints what a sweep asks, its axes, arms and sets of shapes.

    Args:
        config: composed, so that parts and values are those that the command line would run.

    Raises:
        UsageError: it names no suite.
    """
    text = f"sweep={config.name}: {config.question}\n"
    parts: Mapping[str, PartConfig | SweepConfig] = config.parts or {"": config}
    for name, part in parts.items():
        title = f"part {name}: " if name else ""
        text += f"\n{title}suite {part.suite}\n{_part(part)}"
    sys.stdout.write(text + "\nkeys of all sweeps: python -m harness --help\n")


def _part(part: PartConfig | SweepConfig) -> str:
    from harness.suites import SUITES
    from harness.suites.shapes import SHAPES

    if part.suite not in SUITES:
        raise unknown("suite", str(part.suite), SUITES)
    suite = SUITES[str(part.suite)]
    text = listed((f"axes.{name}", _axis(axis, part.axes.get(name))) for name, axis in suite.AXES.items())
    here = part.arms or list(suite.ARMS)
    text += listed([("arms", f"{', '.join(here)}"), *_absent(here, suite.ARMS)])
    if part.shapes:
        used = [part.shapes] if isinstance(part.shapes, str) else part.shapes
        text += listed([("shapes", f"{', '.join(used)}; there are {', '.join(SHAPES)}, from_model")])
    return text


def _absent(here: Sequence[str], every: Iterable[str]) -> list[tuple[str, str]]:
    others = [arm for arm in every if arm not in here]
    return [("", f"not here by default: {', '.join(others)}")] if others else []


def _axis(axis: Axis, here: object) -> str:
    """Meaning of an axis, the values of this sweep, and what else it takes."""
    if here is None:
        here = axis.choices[0] if axis.default is None and axis.choices else axis.default
    description = f"{axis.doc}; here {_value(here)}" if here is not None else axis.doc
    taken = ", ".join(_value(v) for v in (*axis.choices, *axis.words))
    return f"{description}; takes {taken}" if taken else description


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return str(value).lower() if isinstance(value, bool) else '""' if value == "" else str(value)


def _arms(name: str) -> list[tuple[str, str]]:
    from harness.suites import SUITES

    if not name:
        raise UsageError(f"arms belong to a suite: list arms SUITE, one of {', '.join(SUITES)}")
    if name not in SUITES:
        raise unknown("suite", name, SUITES)
    return [
        (name, f"{arm.doc}; compared with {arm.baseline}" if arm.baseline else arm.doc)
        for name, arm in SUITES[name].ARMS.items()
    ]


def _models() -> list[tuple[str, str]]:
    from harness.training.models import MODELS

    return [(name, f"{_whose(MODELS, name)}{spec.doc}; {spec.source}") for name, spec in MODELS.items()]


def _gpus() -> list[tuple[str, str]]:
    from harness.machine.hardware import DEVICES

    return [
        (
            "_".join(device.key.lower().split()),
            f"{device.memory_gib:g} GiB, {device.bandwidth_tb_s:g} TB/s, dense TFLOP/s: "
            + ", ".join(f"{name} {value:g}" for name, value in device.tflops.items()),
        )
        for device in DEVICES
    ]


def _recipes() -> list[tuple[str, str]]:
    from fp8core import RECIPES

    return [(name, _whose(RECIPES, name) + recipe.doc) for name, recipe in RECIPES.items()]


def _whose(table: ExtensionTable[Any], name: str) -> str:
    """The package of an entry, which its description begins with; "" for ours."""
    return f"[{owner.owner}, not ours] " if (owner := table.owner(name)) else ""


def _extensions() -> list[tuple[str, str]]:
    """Every entry point, none of them imported; whether it can be used is what doctor says."""
    from fp8core.extensions import installed
    from harness.store.extensions import TABLES

    found = [each for table in TABLES for each in installed(table)]
    if not found:
        return [("none", "no installed package has an entry point for the harness (docs/howto-add.md)")]
    doctor = ("", "python -m harness doctor says which of them can be used here")
    return [(f"{e.table.removesuffix('s')} {e.name}", f"{e.owner}, not ours: {e.target}") for e in found] + [
        doctor
    ]


_TABLES: Mapping[str, Callable[[], Iterable[tuple[str, str]]]] = {
    "sweeps": lambda: [(name, question(path)) for name, path in sorted(sweeps().items())],
    "models": _models,
    "gpus": _gpus,
    "recipes": _recipes,
    "extensions": _extensions,
}
