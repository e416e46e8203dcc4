"""A suite without tensors, to drive the plan, the executor and the command line in milliseconds.

Each worker imports this anew: pytest and the command line, half a second, are left to those who ask for them.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.timing.workload import ArmInfo, Axis, Numerics, Plannable, Unsupported, Workload

if TYPE_CHECKING:
    import pytest

    from harness.engine.plan import SweepPlan
    from harness.store.case import Case, Scalar


def nothing() -> None:
    """The cheapest closure there is."""


@dataclass
class ToySuite:
    """Two arms over two axes; `behaviour` replaces what building one arm does."""

    AXES: Mapping[str, Axis] = field(
        default_factory=lambda: {
            "n": Axis("a size"),
            "K": Axis("an inner dimension", linked=True),
            "kind": Axis("a word", choices=("a", "b")),
        }
    )
    ARMS: Mapping[str, ArmInfo] = field(
        default_factory=lambda: {
            "base": ArmInfo("the baseline"),
            "other": ArmInfo("the candidate", baseline="base"),
        }
    )
    behaviour: Mapping[str, Callable[[Case], Workload]] = field(default_factory=dict)
    refuses: Mapping[str, Unsupported] = field(default_factory=dict)

    def points(
        self, shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
    ) -> list[dict[str, Scalar]]:
        for name in shapes:
            if name != "few":
                raise ValueError(f"unknown shape set {name!r}; known: few")
        return [{"K": k} for k in axes["K"]] if "K" in axes else [{}]

    def unsupported(self, case: Case, arm: str, device: str) -> Unsupported | None:
        if dict(case.axes).get("K") == 100 and arm == "other":
            return Unsupported("shape", "K=100 is not a multiple of 16; use K=96 or K=112")
        return self.refuses.get(arm)

    def work(self, case: Case) -> float:
        return float(case.integer("n"))

    def build(self, case: Case, arm: str, device: str) -> Workload:
        if arm in self.behaviour:
            return self.behaviour[arm](case)
        return Workload(
            run=nothing,
            check=lambda: Numerics({"sqnr_db": 28.5}),
            flops={"bf16": 1.0},
            bytes_moved=2.0,
            resolved={"timed": "nothing"},
        )


@functools.cache
def _modules() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    sys.path.append(folder.name)
    return folder


def as_module(suite: Plannable) -> ModuleType:
    """The suite as what suites are: a module, which the processes of arms find by its name."""
    folder = Path(_modules().name)
    name = f"toy_{id(suite):x}_{len([*folder.iterdir()])}"
    (folder / f"{name}.py").write_text(
        f"import pickle\nsuite = pickle.loads({pickle.dumps(suite)!r})\n"
        "globals().update({name: getattr(suite, name) for name in dir(suite) if not name.startswith('_')})\n"
    )
    importlib.invalidate_caches()
    return importlib.import_module(name)


SWEEP = """\
# Does the toy pay?
suite: toy
isolate: false
axes: {n: %s}
timing: {min_rounds: 3, max_rounds: 3, min_samples: 1, min_seconds: 0.0, warmup_min_iterations: 1,
         warmup_min_seconds: 0.0, warmup_max_seconds: 0.1}
"""


def offered(sizes: Sequence[int], folder: Path, monkeypatch: pytest.MonkeyPatch) -> ToySuite:
    """A toy that `sweep=toy` measures in this process, over these sizes; the folder becomes the current one."""
    from harness.cli import run

    (folder / "sweeps").mkdir()
    (folder / "sweeps" / "toy.yaml").write_text(SWEEP % list(sizes))
    monkeypatch.chdir(folder)
    suite = ToySuite()
    monkeypatch.setitem(run.SUITES, "toy", suite)
    return suite


def planned(suite: Any, axes: Mapping[str, Any], **changes: Any) -> SweepPlan:
    """The plan of a sweep of one suite, on a CPU."""
    from harness.engine.plan import make_plan
    from harness.engine.settings import SweepConfig

    config: dict[str, Any] = {
        "name": "toy", "suite": "toy", "axes": axes, "shapes": [], "arms": [], "parts": {}, "model": None, "seed": 0,
        "device": "cpu",
    }  # fmt: skip
    return make_plan(SweepConfig.of(config | changes), {"toy": suite})
