"""Recipe: which operand of which GEMM is cast to FP8, and how. Data only.

A Linear layer is three GEMMs (`input` [M, K], `weight` [N, K], `grad_output` [M, N]; M counts tokens):

    output      [M, N] = input         [M, K] @ weight.T [K, N]     contracts over K, the input features
    grad_input  [M, K] = grad_output   [M, N] @ weight   [N, K]     contracts over N, the output features
    grad_weight [N, K] = grad_output.T [N, M] @ input    [M, K]     contracts over M, the tokens

Each has a left operand `a` and a right operand `b`. `None` in place of a `Cast` leaves the operand in high
precision. *tensorwise* = one scale for the whole operand; *rowwise* = one scale for each row of `a` and each
column of `b`, that is, along the contracted axis, so that every scale can be taken out of the sum.

The three published recipes equal those of `torchao.float8` 0.18 (`config.py`, `from_recipe_name`). To add a
recipe, add a literal to `RECIPES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fp8core.formats import Format, native_pair

Granularity = Literal["tensorwise", "rowwise"]
GRANULARITIES: tuple[str, ...] = get_args(Granularity)
GEMMS: tuple[str, ...] = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True, slots=True)
class Cast:
    """How one operand of one GEMM is brought to FP8.

    Attributes:
        format: the element format.
        granularity: how many elements share a scale; see the module docstring.
        power_of_two: round each scale down to a power of two, which makes scaling itself exact.
    """

    format: Format
    granularity: Granularity = "tensorwise"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(
                f"granularity {self.granularity!r} is unknown; expected one of {', '.join(GRANULARITIES)}"
            )

    @property
    def axis_free(self) -> bool:
        """True when codes and scale are the same whichever axis is contracted, so one cast serves two GEMMs."""
        return self.granularity == "tensorwise"

    def __str__(self) -> str:
        return f"{self.format.short}_{self.granularity}" + ("_pow2" if self.power_of_two else "")


@dataclass(frozen=True, slots=True)
class Gemm:
    """One of the three GEMMs: its operands' casts, and whether the hardware may accumulate with fewer bits."""

    a: Cast | None
    b: Cast | None
    fast_accum: bool = False

    def __post_init__(self) -> None:
        if (self.a is None) != (self.b is None):
            raise ValueError(
                f"operand a is {self.a}, operand b is {self.b}: no kernel multiplies FP8 by high precision; "
                "cast both operands or neither"
            )

    @property
    def is_fp8(self) -> bool:
        """False for a GEMM left in high precision."""
        return self.a is not None

    @property
    def granularity(self) -> Granularity:
        """Of the multiplication: rowwise if either operand is, since no kernel mixes the two."""
        rowwise = any(cast is not None and cast.granularity == "rowwise" for cast in (self.a, self.b))
        return "rowwise" if rowwise else "tensorwise"

    def __str__(self) -> str:
        return f"{self.a} @ {self.b}" if self.is_fp8 else "high precision"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a Float8Linear needs to know.

    Attributes:
        name: as users say it ("rowwise"); "custom" when it came from a hand-made configuration.
        doc: its equations in words.
        output, grad_input, grad_weight: the three GEMMs.
        backend: who multiplies, a key of `fp8core.gemm.BACKENDS`; "reference" emulates in high precision.
        pad_inner_dim: fill dimensions up to the next multiple of 16 with zeros, which changes no result.
    """

    name: str
    doc: str
    output: Gemm
    grad_input: Gemm
    grad_weight: Gemm
    backend: str = "torch"
    pad_inner_dim: bool = False

    @property
    def gemms(self) -> dict[str, Gemm]:
        """The three GEMMs by name, in the order of `GEMMS`."""
        return {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}

    @property
    def fp8_gemms(self) -> int:
        """How many of the three GEMMs take FP8 operands."""
        return sum(gemm.is_fp8 for gemm in self.gemms.values())

    def __str__(self) -> str:
        extras = "" if self.backend == "torch" else f", backend={self.backend}"
        return self.name + extras + (", pad_inner_dim" if self.pad_inner_dim else "")


_E4M3, _E5M2 = native_pair()
_TENSOR = Cast(_E4M3)
_TENSOR_GRAD = Cast(_E5M2)
_ROW = Cast(_E4M3, "rowwise", power_of_two=True)
_TENSOR_POW2 = Cast(_E4M3, power_of_two=True)

RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe(
            name="tensorwise",
            doc=(
                "output = e4m3(input) @ e4m3(weight).T, grad_input = e5m2(grad_output) @ e4m3(weight), "
                "grad_weight = e5m2(grad_output).T @ e4m3(input); one fp32 scale a tensor; fast accumulation "
                "in the forward GEMM only. Cheapest; one outlier costs the whole tensor its small values."
            ),
            output=Gemm(_TENSOR, _TENSOR, fast_accum=True),
            grad_input=Gemm(_TENSOR_GRAD, _TENSOR),
            grad_weight=Gemm(_TENSOR_GRAD, _TENSOR),
        ),
        Recipe(
            name="rowwise",
            doc=(
                "All operands of all three GEMMs e4m3, with one power-of-two scale for each row (a) or column "
                "(b), so that each operand is cast anew along each axis over which it is contracted; fast "
                "accumulation in the forward GEMM only. Robust to outlier tokens and channels; more casts."
            ),
            output=Gemm(_ROW, _ROW, fast_accum=True),
            grad_input=Gemm(_ROW, _ROW),
            grad_weight=Gemm(_ROW, _ROW),
        ),
        Recipe(
            name="rowwise_with_gw_hp",
            doc=(
                "output = e4m3_rowwise(input) @ e4m3_rowwise(weight).T, grad_input = "
                "e4m3_rowwise(grad_output) @ e4m3_tensorwise(weight), grad_weight = grad_output.T @ input in "
                "high precision; power-of-two scales. Input and grad_output are cast along one axis only, and "
                "the number of tokens need not be a multiple of 16."
            ),
            output=Gemm(_ROW, _ROW, fast_accum=True),
            grad_input=Gemm(_ROW, _TENSOR_POW2),
            grad_weight=Gemm(None, None),
        ),
    )
}


def recipe_named(name: str) -> Recipe:
    """The published recipe of that name.

    Raises:
        ValueError: unknown; the message lists the known names.
    """
    try:
        return RECIPES[name]
    except KeyError:
        raise ValueError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}") from None
