"""What a count of a step's matrix products yields: rows, shares and one line of text. Pure functions of the rows."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from fp8core.proof.formulas import Causal
    from fp8core.proof.recorder import Phase

FP8_DTYPES = ("e4m3", "e5m2")
EMULATED = "emulated"
FOUR_BITS = "e2m1"
WEIGHT = "weight"  # role of a product with a parameter
_PARAMETRIZED = re.compile(r"\bparametrizations\.(\w+)\.original\d*$")


def name_in_layer(name: str) -> str:
    """A parameter's name as its layer has it, also where torch's `register_parametrization` has put it into a list.

    >>> name_in_layer("0.parametrizations.weight.original1")
    '0.weight'
    """
    return _PARAMETRIZED.sub(r"\1", name)


@dataclass(frozen=True, slots=True)
class Matmul:
    """The products of one owner by one operator in one pass.

    Attributes:
        owner: fully qualified name of the parameter that takes part; where none does, of the module that runs.
        role: "weight" (a parameter takes part), "attention scores", "attention values", "convolution" or "product".
        operator: "aten.mm", "fp8core.scaled_grouped_mm", ...
        dtype: "e4m3" or "e5m2" (if either operand is) for FP8 operands; "emulated" for operands in high precision that
            were FP8 codes just before; "e2m1" for operands of four bits, whose product is emulated; else the operands' dtype,
            "bfloat16".
        phase: "forward"; "backward"; "recompute", a forward pass again for the backward one; "outside" of the model
            and without a parameter, such as an optimizer's.
        calls: of the operator.
        flops: 2 M K N for each product.
    """

    owner: str
    role: str
    operator: str
    dtype: str
    phase: Phase
    calls: int
    flops: float

    @property
    def is_fp8(self) -> bool:
        """Whether the operands are FP8 codes."""
        return self.dtype in FP8_DTYPES

    @property
    def name(self) -> str:
        """The owner with "*" for numbers of layers and without ".weight", or the role of attention: the same for all layers."""
        if self.role.startswith("attention"):
            return self.role
        parts = [part for part in self.owner.split(".") if part and part != "_orig_mod"]
        if len(parts) > 1 and parts[-1] == "weight":
            parts.pop()
        kept = ["*" if part.isdigit() and i < len(parts) - 1 else part for i, part in enumerate(parts)]
        if self.role != WEIGHT:
            return f"{self.role} in {'.'.join(kept) or 'the model'}"
        return ".".join(kept)


@dataclass(frozen=True, slots=True)
class Uncounted:
    """What multiplies matrices, or may, and was not looked into: where it ran and how often.

    Attributes:
        operator: without a formula; or an `autograd.Function` whose result no operator of PyTorch has written.
        owner: the module that ran.
        calls: of it.
    """

    operator: str
    owner: str
    calls: int


@dataclass(frozen=True, slots=True)
class MatmulCount:
    """Every matrix product of a step.

    Attributes:
        matmuls: one row for each owner, operator, dtype and pass.
        uncounted: operators whose FLOPs are not known; shares are then those of what was counted.
        causal: the convention for fused attention with a causal mask: "full" or "half" of its pairs count.
        causal_flops: FLOPs that were counted by that convention.
    """

    matmuls: tuple[Matmul, ...]
    uncounted: tuple[Uncounted, ...] = ()
    causal: Causal = "full"
    causal_flops: float = 0.0

    @property
    def of_model(self) -> tuple[Matmul, ...]:
        """The rows of the forward and the backward pass, which shares refer to; without recomputation."""
        return tuple(row for row in self.matmuls if row.phase in ("forward", "backward"))

    @property
    def flops(self) -> float:
        """FLOPs of one forward and backward pass."""
        return sum(self.by_dtype().values())

    @property
    def fp8_share(self) -> float:
        """Share of them with FP8 operands, 0..1; 0 where nothing was counted."""
        return sum(row.flops for row in self.of_model if row.is_fp8) / self.flops if self.flops else 0.0

    @property
    def not_in_fp8(self) -> dict[str, float]:
        """Name -> share of them of what is not in FP8, largest first; names as `Matmul.name`."""
        sums: defaultdict[str, float] = defaultdict(float)
        for row in self.of_model:
            if not row.is_fp8:
                how = {EMULATED: " (emulated)", FOUR_BITS: " (e2m1, emulated)"}.get(row.dtype, "")
                sums[row.name + how] += row.flops
        ranked = sorted(sums.items(), key=lambda item: -item[1])
        return {name: amount / self.flops for name, amount in ranked if amount}

    @property
    def text(self) -> str:
        """One line: the share, what is not in FP8, what could not be counted, and conventions."""
        if not self.flops:
            line = "no matrix product was counted"
        else:
            share = "all" if self.uncounted and self.fp8_share == 1 else percent(self.fp8_share)
            line = f"{share} of the counted matmul FLOPs in FP8"
            rest = _short(self.not_in_fp8)
            if rest:
                line += "; not in FP8: " + ", ".join(
                    f"{name} {percent(share)}" for name, share in rest.items()
                )
        if self.uncounted:
            calls: defaultdict[str, int] = defaultdict(int)
            for row in self.uncounted:
                calls[row.operator] += row.calls
            line += "; cannot be counted: " + ", ".join(f"{name} ({n} calls)" for name, n in calls.items())
        if self.causal_flops:
            which = (
                "all pairs of a causal mask"
                if self.causal == "full"
                else "half of the pairs of a causal mask"
            )
            line += f"; fused attention counts {which}"
        beside: dict[Phase, str] = {
            "recompute": "recomputation adds {} and is",
            "outside": "products outside of the model (an optimizer's, say) add {} and are",
        }
        for phase, words in beside.items():
            more = sum(self.by_dtype([phase]).values())
            if more and self.flops:
                line += f"; {words.format(percent(more / self.flops))} not counted"
        return line

    def by_dtype(self, phases: Collection[Phase] = ("forward", "backward")) -> dict[str, float]:
        """dtype -> FLOPs of these passes."""
        sums: defaultdict[str, float] = defaultdict(float)
        for row in self.matmuls:
            if row.phase in phases:
                sums[row.dtype] += row.flops
        return dict(sums)


def percent(share: float) -> str:
    """One decimal; never "100.0 %" or "0.0 %" of a share that is not exactly that."""
    shown = f"{100 * share:.1f}"
    if shown == "100.0" and share < 1:
        return "99.9 %"
    if shown == "0.0" and share > 0:
        return "below 0.1 %"
    return f"{shown} %"


def _short(shares: dict[str, float]) -> dict[str, float]:
    """Names cut to their last two parts where these tell them apart."""

    def cut(name: str) -> str:
        parts = name.split(".")
        return name if " " in name else ".".join(parts[-3:] if parts[-2:-1] == ["*"] else parts[-2:])

    cuts = [cut(name) for name in shares]
    return {cut(name) if cuts.count(cut(name)) == 1 else name: share for name, share in shares.items()}
