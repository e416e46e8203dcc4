"""Arm: what one arm of a case is, as a record. The one place that knows how an arm's name is spelled.

Suites declare their arms as records (`harness.timing.workload.arm_table`), rows store them (`arm_fields`), readers take fields.
Names stay what people type and what files hold: `str(arm)` prints one, `parse` reads one back. The parser is the table of
all records printed, so it takes no name apart and guesses nothing: a name that is not in the table is a `variant`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from harness.store import extensions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

CONTROL_SUFFIX = ":again"  # of the A/A control: a baseline timed a second time in the same rounds
WITHOUT_FP8 = ("bf16", "base", "no_fp8")  # `recipe` of arms whose layers stay in high precision
GOLDEN, EPS, OTHER = "golden", "eps", "other"  # variants of training runs, see harness.suites.divergence
WARMUP, COOLDOWN = "warmup", "cooldown"
# Variants of training runs that round only one part of a recipe, in emulation: an operand, a GEMM; or that change the
# format of the gradients. They show what each part costs in loss; nobody trains them.
ONLY_OPERAND = {f"only_{name}": name for name in ("input", "weight", "grad_output")}
ONLY_GEMM = {f"only_{name}": name for name in ("output", "grad_input", "grad_weight")}
GRAD_FORMAT = {f"{name}_gradients": name for name in ("e4m3", "e5m2")}
ABLATIONS = (*ONLY_OPERAND, *ONLY_GEMM, *GRAD_FORMAT)
_SWITCHING = {WARMUP: "base_to_{}", COOLDOWN: "{}_to_base"}


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm of a case. Fields that do not apply are "".

    Attributes:
        recipe: name of the FP8 recipe, or one of `WITHOUT_FP8`.
        mode: how it is run: eager, compile, graph, linears (its Linears compiled one by one).
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
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


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
_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "static", "blockwise", "mxfp8")
_PEERS = ("torchao", "torchaomx", "nocompile", "te", "deepgemm", "aiter", "tutorial", "nanochat", "scaled_mm")
_MODES = ("eager", "compile", "graph", "linears")


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
