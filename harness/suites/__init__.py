"""Suites: what is measured, each with its oracle. Imported on use; to add one: its module here, and its line in `NAMES`.

From another package, an entry point of the group `fp8_harness.suites` that names a module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING

from harness.store import extensions

if TYPE_CHECKING:
    from fp8core.extensions import Table
    from harness.timing.workload import Suite, TrialSuite

# The axes of each suite by name, so that a mistyped one is refused before torch is imported; a test holds them to `AXES`
NAMES: Mapping[str, tuple[str, ...]] = {
    "accumulation": (
        "K",
        "data",
    ),
    "allgather": (
        "ranks",
        "param_dtype",
        "width",
        "hidden",
        "layers",
        "tokens",
        "rounds",
    ),
    "cast": (
        "dtype",
        "granularity",
        "M",
        "K",
        "src",
    ),
    "ceilings": (
        "what",
        "mib",
        "cube",
    ),
    "checksum": (
        "cube",
        "data",
    ),
    "codes": (
        "source",
        "dtype",
        "inputs",
    ),
    "divergence": (
        "model",
        "data",
        "data_path",
        "batch",
        "seq",
        "accumulation",
        "steps",
        "seed",
        "compute",
        "schedule",
        "lr",
        "min_lr_frac",
        "lr_warmup",
        "beta1",
        "beta2",
        "weight_decay",
        "grad_clip",
        "layers",
        "checkpointing",
        "experts",
        "ranks",
        "fp8_all_gather",
        "eval_every",
        "eval_batches",
        "diagnose_every",
    ),
    "gemm": (
        "M",
        "K",
        "N",
        "tokens",
        "role",
        "data",
    ),
    "linear": (
        "M",
        "K",
        "N",
        "tokens",
    ),
    "outliers": (
        "data",
        "role",
        "M",
        "K",
        "N",
    ),
    "parallel": (
        "cell",
        "steps",
    ),
    "recipes": (
        "M",
        "K",
        "N",
        "tokens",
    ),
    "scale": (
        "model",
        "gpu",
        "world",
        "batch",
        "seq",
        "accumulation",
        "checkpointing",
        "tp",
        "replicas",
        "node",
        "weights",
        "reduce",
        "reduce_each",
        "network_gb_s",
        "runs",
        "proof",
    ),
    "smoke_kernels": (
        "kernel",
        "do",
        "M",
        "K",
    ),
    "smoke_layers": (
        "M",
        "K",
        "N",
    ),
    "train": (
        "model",
        "data",
        "data_path",
        "layers",
        "batch",
        "seq",
        "accumulation",
        "compute",
        "checkpointing",
        "ranks",
        "fp8_all_gather",
        "experts",
        "convert",
        "ceilings",
        "profile",
        "profile_start",
        "profile_end",
    ),
}


class _Suites(MutableMapping[str, "Suite | TrialSuite"]):
    """A table of modules that imports a suite, and torch with it, when the suite is asked for."""

    def __init__(self, names: Iterable[str]) -> None:
        self._suites: dict[str, Suite | TrialSuite | None] = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Suite | TrialSuite:
        if name not in self._suites:
            if name not in extensions.names("suites"):
                raise KeyError(name)
            return self.others[name]
        suite = self._suites[name]
        if suite is None:
            suite = importlib.import_module(f"{__name__}.{name}")
            assert suite is not None
            self._suites[name] = suite
        return suite

    def __setitem__(self, name: str, suite: Suite | TrialSuite) -> None:
        _refuse_while_importing(name)
        self._suites[name] = suite

    def __delitem__(self, name: str) -> None:
        _refuse_while_importing(name)
        del self._suites[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._suites, *extensions.names("suites")]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._suites or name in extensions.names("suites")  # without importing it

    def axis_names(self, name: str) -> tuple[str, ...] | None:
        """Axes of a suite without importing it; None of one that another package brings."""
        suite = self._suites.get(name)
        if suite is not None:
            return tuple(suite.AXES)
        return NAMES[name] if name in self._suites else None

    @cached_property
    def others(self) -> Table[Suite | TrialSuite]:
        """The suites that other packages bring."""
        from fp8core.extensions import Table

        return Table("suites", {}, _fault, self._suites)


def _refuse_while_importing(name: str) -> None:
    # Extensions are imported by that module alone; importing it here would import torch
    if (loaded := sys.modules.get("fp8core.extensions")) is not None:
        loaded.refuse_while_importing("suites", name)


def _fault(name: str, made: object) -> str:
    """Workers find a suite by its module's name, so an object in a module would not reach them."""
    from harness.timing.workload import Suite, TrialSuite

    if not isinstance(made, ModuleType):
        return f"it is of type {type(made).__name__}; expected a module: name it without ':attribute'"
    lacks = [word for word in ("AXES", "ARMS", "points", "unsupported", "work") if not hasattr(made, word)]
    lacks += [] if isinstance(made, Suite | TrialSuite) or lacks else ["build or trial"]
    return f"the module lacks {', '.join(lacks)}" if lacks else ""


SUITES = _Suites(NAMES)
