"""What fp8core's recipes cost, as plain data for the prediction: bytes of each cast, GEMMs in FP8, kind of product.

Eager casts are fp8core's fused kernels (`harness.advise.cast_traffic`). Under torch.compile they are generated code: bytes are
those that Inductor counts (`COUNTED`). Which of them write a transposed result follows from rules, as do the bytes of a
recipe that is not counted there: the amax of an input is taken where the input is made; a product's
result (output gradient) and a weight are read once more for theirs; one cast that serves both contractions is kept as
codes and transposed as codes; every other second cast reads the tensor again, and once more if its scales need it.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from fp8core.distributed.weight_gather import recipe_reason
from fp8core.recipe import RECIPES
from harness.advise.cast_traffic import bytes_of, cast_bytes, casts_of
from harness.advise.casts import GEMMS, TENSORS, CastCost, RecipeCost
from harness.machine.ceilings import ROWWISE, TENSORWISE

if TYPE_CHECKING:
    from fp8core.recipe import Cast as CoreCast
    from fp8core.recipe import Recipe as CoreRecipe

# Case of reports/published/studies/compiled-casts.md -> columns of the inputs that are made so in a block of Llama-3-8B: one by
# attention, with which nothing fuses, two by a norm, one by SwiGLU. What a cast of an input costs depends on what makes it;
# figures are means over them.
CASES = {"Linear": 4096, "RMSNorm -> Linear": 2 * 4096, "SwiGLU -> Linear": 14336}
# recipe -> in each of the cases bytes an element beyond bf16 of input, weight, output gradient, counted by
# `python reports/studies/compiled_casts.py`; a test holds them to its page.
COUNTED = {
    "tensorwise": ((6.0, 8.0, 6.0), (2.0, 8.0, 6.0), (4.0, 8.0, 6.0)),
    "rowwise": ((6.0, 8.0, 6.0), (4.0, 8.0, 6.0), (0.0, 6.0, 6.0)),
    "rowwise_with_gw_hp": ((3.0, 8.0, 3.0), (1.0, 8.0, 3.0), (1.0, 8.0, 3.0)),
    "delayed": ((6.0, 6.0, 6.0), (0.0, 6.0, 6.0), (4.0, 6.0, 6.0)),
    "blockwise": ((8.0, 8.0, 8.0), (6.0, 8.0, 8.0), (4.0, 8.0, 8.0)),
}
# Rates of products over those of one scale a tensor by cuBLAS. Rowwise: 1216 over 1230 TFLOP/s, cuBLAS on H100, torch 2.11
# (tritonbench pull request 1149). Blocks: 870 TFLOP/s, Triton on H100 (FBGEMM pull request 2546; 1126 for one scale by
# Triton), over cuBLAS's 1403 on H100 (ml-engineering, MAMF table): fp8core multiplies blocks by Triton, one scale by cuBLAS.
_BLOCKS = 870 / 1403
_PRODUCT_SHARE = {"tensorwise": 1.0, "rowwise": 0.99, "1x128": _BLOCKS, "128x128": _BLOCKS, "1x32": _BLOCKS}
# Granularity of products -> architectures that run them; why not elsewhere. None run the others in FP8.
_NVIDIA = (("8.9", "9.0", "10.0", "12.0"), "fp8core's own kernel is for NVIDIA GPUs")
_NEEDS = {
    "rowwise": (("9.0", "10.0", "gfx942", "gfx950"), "rowwise kernels are known to work on these alone"),
    "1x128": _NVIDIA,
    "128x128": _NVIDIA,
}


def candidates(compiled: bool) -> dict[str, RecipeCost]:
    """Every recipe of fp8core as it runs in that mode; of one from outside no rate is known that it could be predicted by."""
    # A scale that is measured once is no general advice
    return {
        name: described(recipe, compiled)
        for name, recipe in RECIPES.own.items()
        if recipe.scaling != "static" and not recipe.is_four_bit  # which are emulated
    }


def unavailable(name: str, capability: str, compiled: bool) -> str:
    """Why a GPU of that architecture cannot run a recipe in FP8, or not as `candidates` says; "" if it can."""
    if not compiled and capability.startswith("gfx"):
        return "fp8core's cast kernels are for NVIDIA GPUs: eager casts would be plain operators; take mode=compile"
    granularity = _granularity(RECIPES[name])
    if granularity == "1x32":
        return "no backend of fp8core multiplies it in FP8 yet: it would be emulated"
    needed, why = _NEEDS.get(granularity, ((capability,), ""))
    return "" if capability in needed else f"needs {', '.join(needed)}, this GPU is {capability}: {why}"


def described(recipe: CoreRecipe, compiled: bool) -> RecipeCost:
    """One recipe; eager casts by kernels, compiled ones by generated code."""
    granularity = _granularity(recipe)
    # Codes are gathered where one scale a tensor lets FSDP do it, under tensor parallelism too. A shard is read, for its
    # amax too if the scale is new, and written as codes; gathered codes are transposed once, backward.
    first = recipe.gemms["output"].b
    gathers = first is not None and first.granularity == "tensorwise" and not recipe_reason(recipe)
    return RecipeCost(
        name=recipe.name,
        by="compiler" if compiled else "kernels",
        casts={tensor: (_compiled if compiled else _fused)(recipe, tensor) for tensor in TENSORS},
        fp8_gemms=tuple(name for name in GEMMS if recipe.gemms[name].is_fp8),
        kind=ROWWISE if granularity == "rowwise" else TENSORWISE,
        product_share=_PRODUCT_SHARE[granularity],
        one_scale=all(gemm.granularity == "tensorwise" for gemm in recipe.gemms.values() if gemm.is_fp8),
        scaling=recipe.scaling,
        fuses_gathers=granularity == "tensorwise",  # pytorch issue 149990
        gathered_weight=CastCost(3.0 + 2.0 * _whole(first), 2.0) if gathers else None,
    )


def _granularity(recipe: CoreRecipe) -> str:
    """One scale a tensor needs no second product kernel; the finest granularity of the first FP8 product decides."""
    return next((gemm.granularity for gemm in recipe.gemms.values() if gemm.is_fp8), "tensorwise")


def _layout(recipe: CoreRecipe) -> object:
    """What the bytes of casts follow from: granularity and origin of each scale, and which tensors are cast once."""
    pairs = [casts_of(recipe, tensor) for tensor in TENSORS]
    each = [[cast and (cast.granularity, cast.scaling) for cast in pair] for pair in pairs]
    return each, [first == second for first, second in pairs]


def _fused(recipe: CoreRecipe, tensor: str) -> CastCost:
    total = cast_bytes(recipe, {tensor: (1, 1)})
    along_1, _ = casts_of(recipe, tensor)
    forward = 0.0 if tensor == "grad_output" else bytes_of(along_1, False)
    return CastCost(total, kernels=(total > 0) + (total > 4.5), forward=forward if total else 0.0)


def _compiled(recipe: CoreRecipe, tensor: str) -> CastCost:
    """Inductor's count of bytes, divided into ordered and transposing passes as the rules divide theirs."""
    along_1, along_0 = casts_of(recipe, tensor)
    streamed = strided = forward = 0.0
    if along_1 is not None:
        streamed = 3.0 + 2.0 * (_whole(along_1) and tensor != "input")
        forward = streamed * (tensor != "grad_output")
    if along_0 is not None and along_0 == along_1 and along_0.axis_free:
        strided = 2.0
    elif along_0 is not None:
        strided = 3.0 + 2.0 * (along_0.granularity == "rowwise")
        streamed += 2.0 * _whole(along_0)
    kernels = (along_1 is not None) + _whole(along_1) + (along_0 is not None)
    counts = next((COUNTED[name] for name in COUNTED if _layout(RECIPES[name]) == _layout(recipe)), None)
    if counts is None or not streamed + strided:
        return CastCost(streamed, strided, kernels, forward)
    counted = (bytes_each[TENSORS.index(tensor)] for bytes_each in counts)
    total = sum(map(operator.mul, CASES.values(), counted)) / sum(CASES.values())
    part = total / (streamed + strided)
    return CastCost(streamed * part, strided * part, kernels, min(forward, total))


def _whole(cast: CoreCast | None) -> bool:
    """Whether the whole tensor must be read before the first code is written."""
    return cast is not None and cast.granularity == "tensorwise" and cast.scaling == "dynamic"
