"""Case: one point of a sweep.

A case is a suite name, the values of that suite's axes and a seed. It holds no tensors and imports no
torch, so a laptop can list, hash and compare the cases of a run made elsewhere.

Axes come in two kinds. *Crossed* axes are multiplied with each other (`dtype` x `granularity`). *Linked*
axes belong together, such as the M, K, N and role of one GEMM of a model; they arrive as `points`, and
each point is crossed with the rest.

A *local* axis says where this machine keeps something. A suite reads it as any other, in every process that runs the
case; it is no part of what the case is, and is stored nowhere.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Scalar = str | int | float | bool | None

LOCAL = (
    "data_path",
    "ceilings",
)  # axes; what lies there is known by the sha256 that its rows hold, see harness.engine.resume


@dataclass(frozen=True, slots=True)
class Case:
    """One point of a sweep; `axes` is sorted by name, so that equal points compare equal."""

    suite: str
    axes: tuple[tuple[str, Scalar], ...]
    seed: int = 0

    @classmethod
    def of(cls, suite: str, axes: Mapping[str, Scalar], seed: int = 0) -> Case:
        """Builds a case from a mapping of axis name to value."""
        return cls(suite, tuple(sorted(axes.items())), seed)

    def __getitem__(self, axis: str) -> Scalar:
        """The value of one axis; KeyError with the known names otherwise."""
        for name, value in self.axes:
            if name == axis:
                return value
        raise KeyError(
            f"case of suite {self.suite!r} has no axis {axis!r}; it has {[n for n, _ in self.axes]}"
        )

    def integer(self, axis: str) -> int:
        """The value of an axis that counts something (a size, a number of tokens)."""
        value = self[axis]
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"axis {axis}={value!r} of suite {self.suite!r} must be an integer")
        return value

    def number(self, axis: str) -> float:
        """The value of an axis that measures something (a learning rate)."""
        value = self[axis]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"axis {axis}={value!r} of suite {self.suite!r} must be a number")
        return float(value)

    def text(self, axis: str) -> str:
        """The value of an axis that names something (a model, a data set)."""
        value = self[axis]
        if not isinstance(value, str):
            raise TypeError(f"axis {axis}={value!r} of suite {self.suite!r} must be a text")
        return value

    @property
    def axes_json(self) -> str:
        """The axes as canonical JSON, as rows store them: sorted keys, no spaces, no local axes."""
        return _canonical(self.shared)

    @property
    def case_id(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of suite, axes and seed: the same on every machine."""
        whole = _canonical({"suite": self.suite, "axes": self.shared, "seed": self.seed})
        return hashlib.sha256(whole.encode()).hexdigest()[:12]

    @property
    def shared(self) -> dict[str, Scalar]:
        """The axes that rows store: all but local ones, such as paths."""
        return {name: value for name, value in self.axes if name not in LOCAL}

    def __str__(self) -> str:
        return f"{self.suite}[" + " ".join(f"{name}={value}" for name, value in self.shared.items()) + "]"


def expand(
    suite: str,
    axes: Mapping[str, Sequence[Scalar]],
    points: Iterable[Mapping[str, Scalar]] = ({},),
    seed: int = 0,
) -> list[Case]:
    """All cases of a sweep: every point crossed with every combination of the axes, in reading order.

    Duplicates (two layers of a model with the same shape and role) are kept once, first place wins.
    """
    names = list(axes)
    combinations = list(itertools.product(*(axes[name] for name in names)))
    cases = (
        Case.of(suite, {**point, **dict(zip(names, values, strict=True))}, seed)
        for point in points
        for values in combinations
    )
    return list(dict.fromkeys(cases))


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
