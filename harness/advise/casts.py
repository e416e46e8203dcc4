"""What bringing the operands of a layer to FP8 costs, by recipe and by the library that does it. Plain data, no torch.

A cast moves bytes for each element of the tensor, some of them in passes that write a transposed result. Input and
output gradient have tokens x features elements, the weight K x N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.machine.ceilings import TENSORWISE

if TYPE_CHECKING:
    from collections.abc import Mapping

FP8CORE, TORCHAO, ENGINE = "fp8core", "torchao", "transformer_engine"
LIBRARIES = (FP8CORE, TORCHAO, ENGINE)
TENSORS = ("input", "weight", "grad_output")
GEMMS = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True, slots=True)
class CastCost:
    """Bytes for an element of one tensor.

    Attributes:
        streamed: of passes that read and write in order.
        strided: of passes that write a transposed result.
        kernels: launches.
        forward: of a pass that serves the forward product alone, in order: what recomputation runs again. It may be
            more than its share of the others, where one read serves both products.
    """

    streamed: float
    strided: float = 0.0
    kernels: int = 2
    forward: float = 0.0

    @property
    def total(self) -> float:
        """All bytes of an element."""
        return self.streamed + self.strided


@dataclass(frozen=True, slots=True)
class RecipeCost:
    """One way to run a Linear layer in FP8.

    Attributes:
        name: of the recipe, as the library calls it.
        by: who casts: "kernels" (fused, transposing in tiles), "compiler" (generated code), "operators" (eager code).
        casts: by tensor, forward and backward together, nothing recomputed.
        fp8_gemms: which of the three GEMMs run in FP8.
        kind: of its products, see `harness.machine.ceilings`.
        shares_input: layers that read one tensor read one cast of it.
        rescaled: bytes for an element of the input's gradient, where a kernel of its own applies the scales to it.
        fuses_gathers: asynchronous tensor parallelism finds its products behind what is gathered.
        product_share: rate of its products over those of `kind`.
        one_scale: every tensor has one scale, the coarsest there is.
        scaling: where a scale is from: "dynamic", or of earlier steps, so that each step must update it.
        gathered_weight: the weight's cast where FSDP sends it in FP8: in order what the shard alone is charged, across what
            the whole is; None where FSDP can't send it so.
    """

    name: str
    by: str
    casts: Mapping[str, CastCost]
    fp8_gemms: tuple[str, ...] = GEMMS
    kind: str = TENSORWISE
    shares_input: bool = True
    product_share: float = 1.0
    one_scale: bool = False
    scaling: str = "dynamic"
    rescaled: float = 0.0
    fuses_gathers: bool = True
    gathered_weight: CastCost | None = None

    @property
    def cast_bytes(self) -> dict[str, float]:
        """Bytes of an element of each tensor."""
        return {tensor: self.casts[tensor].total for tensor in TENSORS}

    @property
    def mean_bytes(self) -> float:
        """Mean over the three tensors."""
        return sum(self.cast_bytes.values()) / len(TENSORS)


def not_by_default(library: str, recipe: RecipeCost) -> str:
    """Why a recipe is not advised unless it is asked for by name; "" if it may be.

    Scales of earlier steps gain by cast kernels of fp8core that no GPU has timed, and need a call in each step.
    """
    if library == FP8CORE and recipe.scaling != "dynamic":
        return "not the default: it rests on cast kernels that no GPU has timed"
    return ""


def provenance(library: str) -> str:
    """What of a library's FP8 layers was not measured, and where."""
    if library == FP8CORE:
        return "fp8core's kernels beyond one H200"
    name = "torchao" if library == TORCHAO else "TransformerEngine"
    return f"{name}'s kernels here (costs from its source, held against its publications)"
