"""Suites: what is measured, each with its oracle. Imported on use; to add one: its module here, and its name in `NAMES`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.timing.workload import Suite, TrialSuite

NAMES = (
    "accumulation",
    "allgather",
    "cast",
    "ceilings",
    "checksum",
    "codes",
    "divergence",
    "gemm",
    "linear",
    "outliers",
    "parallel",
    "recipes",
    "scale",
    "smoke_kernels",
    "smoke_layers",
    "tests",
    "train",
)


class _Suites(MutableMapping[str, "Suite | TrialSuite"]):
    """A table of modules that imports a suite, and torch with it, when the suite is asked for."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._suites: dict[str, Suite | TrialSuite | None] = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Suite | TrialSuite:
        suite = self._suites[name]
        if suite is None:
            suite = importlib.import_module(f"{__name__}.{name}")
            assert suite is not None
            self._suites[name] = suite
        return suite

    def __setitem__(self, name: str, suite: Suite | TrialSuite) -> None:
        self._suites[name] = suite

    def __delitem__(self, name: str) -> None:
        del self._suites[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._suites)

    def __len__(self) -> int:
        return len(self._suites)

    def __contains__(self, name: object) -> bool:
        return name in self._suites  # without importing it


SUITES = _Suites(NAMES)
