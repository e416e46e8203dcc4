"""Recipe `example_e4m3`: as `tensorwise`, with gradients in e4m3 too, multiplied by the backend of this package."""

from __future__ import annotations

from fp8core import Cast, Gemm, Recipe
from fp8core.formats import native_pair

_CAST = Cast(native_pair()[0])

RECIPE = Recipe(
    name="example_e4m3",
    doc="All operands of all three GEMMs e4m3, one dynamic float32 scale a tensor.",
    output=Gemm(_CAST, _CAST),
    grad_input=Gemm(_CAST, _CAST),
    grad_weight=Gemm(_CAST, _CAST),
    backend="example_kernel",
    nearest="tensorwise",
)
