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
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from harness.store import extensions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray


CONTROL_SUFFIX = ":again"  # of the A/A control: a baseline timed a second time in the same rounds
WITHOUT_FP8 = ("bf16", "base", "no_fp8")  # `recipe` of arms whose layers stay in high precision
GOLDEN, EPS, OTHER = "golden", "eps", "other"  # variants of training runs, see harness.suites.divergence
WARMUP, COOLDOWN = "warmup", "cooldown"
NEGATIVE = "negative_control"  # with a known fault
# Variants of training runs that round only one part of a recipe, in emulation: an operand, a GEMM; or that change the
# format of the gradients, or one knob of four bits. They show what each part costs in loss; nobody trains them.
ONLY_OPERAND = {f"only_{name}": name for name in ("input", "weight", "grad_output")}
ONLY_GEMM = {f"only_{name}": name for name in ("output", "grad_input", "grad_weight")}
GRAD_FORMAT = {f"{name}_gradients": name for name in ("e4m3", "e5m2")}
KNOBS = {
    "nearest": "stochastic rounding",
    "no_hadamard": "the Hadamard transform",
    "1x16_weight": "squares of the weight",
}
ABLATIONS = (*ONLY_OPERAND, *ONLY_GEMM, *GRAD_FORMAT, *KNOBS)
_SWITCHING = {WARMUP: "base_to_{}", COOLDOWN: "{}_to_base"}


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm of a case. Fields that do not apply are "".

    Attributes:
        recipe: name of the FP8 recipe, or one of `WITHOUT_FP8`.
        mode: how it is run: eager, compile, graph.
        casts: which casts it uses instead of the mode's own: plain, kernels, fused, fused_both.
        variant: what else sets it apart (golden, eps; of a bare product fast, triton); the whole name where no other field is known.
        peer: first word of the arms of another implementation ("torchao"); "" for ours.
        control: it is the second copy of a baseline, timed to show the noise floor.
    """

    recipe: str = ""
    mode: str = ""
    casts: str = ""
    variant: str = ""
    peer: str = ""
    control: bool = False

    def __str__(self) -> str:
        """The arm's name on the command line and in files.

        >>> str(Arm("tensorwise", "eager", "fused")), str(Arm("rowwise", variant="warmup"))
        ('tensorwise_fused_eager', 'base_to_rowwise')
        """
        if self.variant in _SWITCHING:
            name = _SWITCHING[self.variant].format(self.recipe)
        else:
            words = (self.peer, self.recipe, self.variant, self.casts, self.mode)
            name = "_".join(word for word in words if word)
        return name + CONTROL_SUFFIX * self.control

    @property
    def has_fp8(self) -> bool:
        """Whether a recipe is known and it is an FP8 one."""
        return self.recipe not in ("", *WITHOUT_FP8)

    @property
    def fp8_recipe(self) -> str:
        """Name of the FP8 recipe, "" where there is none."""
        return self.recipe if self.has_fp8 else ""

    @property
    def computes(self) -> Arm:
        """What is computed, however it is run: the recipe and whose it is, of an arm without either the variant."""
        return Arm(self.recipe, peer=self.peer, variant="" if self.recipe or self.peer else self.variant)

    @property
    def modeless(self) -> Arm:
        """The arm without its mode, where it is eager or compile; one that is nothing else stays."""
        bare = replace(self, mode="")
        return bare if self.mode in ("eager", "compile") and bare != Arm() else self

    @property
    def as_json(self) -> str:
        """Canonical JSON, as rows store it in `arm_fields`."""
        return _canonical({f.name: getattr(self, f.name) for f in fields(self)})


@lru_cache(maxsize=4096)
def parse(name: str) -> Arm:
    """The record of a name; `str(parse(name)) == name`.

    >>> parse("torchao_rowwise_eager:again")
    Arm(recipe='rowwise', mode='eager', casts='', variant='', peer='torchao', control=True)
    >>> parse("my_golden")
    Arm(recipe='', mode='', casts='', variant='my_golden', peer='', control=False)
    """
    original = original_name(name)
    known = _by_name().get(original) or Arm(variant=original)
    return known if original == name else replace(known, control=True)


def control_name(arm: str) -> str:
    """The A/A control of a baseline."""
    return arm + CONTROL_SUFFIX


def original_name(arm: str) -> str:
    """The baseline that an A/A control copies; every other arm itself."""
    return arm.removesuffix(CONTROL_SUFFIX)


@lru_cache(maxsize=4096)
def from_json(text: str) -> Arm:
    """The record that a row stores. Fields that a newer version added are left out.

    Raises:
        ValueError: the text is no JSON object of the fields.
    """
    stored = json.loads(text)
    if not isinstance(stored, dict):
        raise ValueError(f"arm_fields {text!r}: expected a JSON object")
    values = {f.name: stored.get(f.name, f.default) for f in fields(Arm)}
    if any(type(value) is not type(f.default) for f, value in zip(fields(Arm), values.values(), strict=True)):
        raise ValueError(f"arm_fields {text!r}: expected texts, and true or false for `control`")
    return Arm(**values)


def arm_of(row: Mapping[str, Any]) -> Arm:
    """The arm of a row of `harness.store.read`; of a row without the column, the record of its name."""
    text = row.get("arm_fields")
    return from_json(text) if isinstance(text, str) else parse(row["arm"])


def baseline_of(row: Mapping[str, Any]) -> Arm:
    """The baseline of a row of `harness.store.compare.paired_ratios`."""
    text = row.get("baseline_fields")
    return from_json(text) if isinstance(text, str) else parse(row["baseline"] or "")


def arms_of(frame: pd.DataFrame) -> list[Arm]:
    """The arm of each row of a frame."""
    if "arm_fields" not in frame.columns:
        return [parse(name) for name in frame["arm"]]
    pairs = zip(frame["arm"], frame["arm_fields"], strict=True)
    return [from_json(text) if isinstance(text, str) else parse(name) for name, text in pairs]


def controls(frame: pd.DataFrame) -> NDArray[np.bool_]:
    """Mask of the rows of a frame that belong to an A/A control."""
    import numpy as np

    return np.fromiter((arm.control for arm in arms_of(frame)), np.bool_, len(frame))


def without_controls(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a frame that are of no A/A control."""
    return frame[~controls(frame)]


# Names that rows without `arm_fields` may hold, and the session's list of parts. A recipe or peer that was added later
# needs no place here: its suite declares the record and its rows store it. Those of installed packages are read as well, so
# that their names can be typed; where the package is absent such a name is a variant.
_RECIPES = (
    "tensorwise",
    "rowwise",
    "rowwise_with_gw_hp",
    "delayed",
    "static",
    "blockwise",
    "mxfp8",
    "nvfp4",
    "mxfp4",
)
_PEERS = ("torchao", "torchaomx", "nocompile", "te", "deepgemm", "aiter", "tutorial", "nanochat", "scaled_mm")
_MODES = ("eager", "compile", "graph")


@lru_cache(maxsize=1)
def _by_name() -> dict[str, Arm]:
    table: dict[str, Arm] = {}
    for arm in _known():
        if table.setdefault(str(arm), arm) != arm:
            raise ValueError(f"arm name {str(arm)!r} stands for both {table[str(arm)]} and {arm}")
    recipes, peers = extensions.names("recipes"), extensions.names("peers")
    others: dict[str, set[Arm]] = {}
    for arm in _known((*_RECIPES, *recipes), (*_PEERS, *peers)) if recipes or peers else ():
        others.setdefault(str(arm), set()).add(arm)
    return {name: arms.pop() for name, arms in others.items() if len(arms) == 1} | table


def _known(recipes: tuple[str, ...] = _RECIPES, peers: tuple[str, ...] = _PEERS) -> Iterator[Arm]:
    for mode in _MODES:
        yield Arm(mode=mode)
        for casts in ("", "plain", "kernels", "fused"):
            for recipe in (*WITHOUT_FP8, *recipes):
                yield Arm(recipe, mode, casts)
        for peer in peers:
            yield Arm(mode=mode, peer=peer)
            for recipe in recipes:
                yield Arm(recipe, mode, peer=peer)
    for casts in ("fused", "fused_both"):
        yield Arm(casts=casts)
    for peer in peers:
        yield Arm(peer=peer)
        yield Arm(variant="precomputed", peer=peer)
        for recipe in recipes:
            yield Arm(recipe, peer=peer)
    for recipe in WITHOUT_FP8:
        yield Arm(recipe)
        yield Arm(recipe, variant=EPS)
        yield Arm(recipe, variant=OTHER)
    for recipe in recipes:
        for variant in ("", GOLDEN, EPS, WARMUP, COOLDOWN, *ABLATIONS, "bf16_gather"):
            yield Arm(recipe, variant=variant)
        for variant in ("fast", "triton", "fast_triton", "fastest"):
            yield Arm(recipe, "eager", variant=variant)
    yield Arm(variant="saturating", mode="compile")


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
