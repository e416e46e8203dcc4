"""What fp8core's recipes cost, as plain data for the prediction: bytes of each cast, GEMMs in FP8, kind of product.

Eager casts are fp8core's fused kernels (`fp8core.kernels.traffic`, by way of `harness.advise.cast_traffic`). Under torch.compile
they are generated code: bytes are those that Inductor counts (`compiled_bytes`). Which of them write a transposed result
follows from rules, as do the bytes of a recipe that is not counted there: the amax of an input is taken where the input is made; a product's
result (output gradient) and a weight are read once more for theirs; one cast that serves both contractions is kept as
codes and transposed as codes; every other second cast reads the tensor again, and once more if its scales need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8core.distributed.gather_reasons import recipe_reason
from fp8core.recipe import RECIPES
from harness.advise.cast_traffic import TENSORS as PLACES
from harness.advise.cast_traffic import cast_bytes, one_layout_bytes
from harness.advise.casts import GEMMS, TENSORS, CastCost, RecipeCost
from harness.advise.compiled_bytes import counted
from harness.machine.ceilings import ROWWISE, TENSORWISE

if TYPE_CHECKING:
    from fp8core.recipe import Cast as CoreCast
    from fp8core.recipe import Recipe as CoreRecipe

# Rates of products over those of one scale a tensor by cuBLAS. Rowwise: 1216 over 1230 TFLOP/s, cuBLAS on H100, torch 2.11
# (tritonbench pull request 1149). Blocks: 870 TFLOP/s, Triton on H100 (FBGEMM pull request 2546; 1126 for one scale by
# Triton), over cuBLAS's 1403 on H100 (ml-engineering, MAMF table): fp8core multiplies blocks by Triton, one scale by cuBLAS.
_BLOCKS = 870 / 1403
_PRODUCT_SHARE = {"tensorwise": 1.0, "rowwise": 0.99, "1x128": _BLOCKS, "1x32": _BLOCKS}
_EMULATED = "no backend of fp8core multiplies it in FP8 yet: it would be emulated"
# recipe -> architectures that run it, "" for any with FP8; why not elsewhere
_NEEDS = {
    "rowwise": (("9.0", "10.0", "gfx942", "gfx950"), "rowwise kernels are known to work on these alone"),
    "rowwise_with_gw_hp": (
        ("9.0", "10.0", "gfx942", "gfx950"),
        "rowwise kernels are known to work on these alone",
    ),
    "blockwise": (("8.9", "9.0", "10.0", "12.0"), "fp8core's own kernel is for NVIDIA GPUs"),
}
_AT_RISK = ("static",)  # a scale that is measured once is no general advice


def candidates(compiled: bool) -> dict[str, RecipeCost]:
    """Every recipe of fp8core as it runs in that mode; of one from outside no rate is known that it could be predicted by."""
    return {name: described(recipe, compiled) for name, recipe in RECIPES.own.items() if name not in _AT_RISK}


def unavailable(name: str, capability: str, compiled: bool) -> str:
    """Why a GPU of that architecture cannot run a recipe in FP8, or not as `candidates` says; "" if it can."""
    if not compiled and capability.startswith("gfx"):
        return "fp8core's cast kernels are for NVIDIA GPUs: eager casts would be plain operators; take mode=compile"
    if name == "mxfp8":
        return _EMULATED
    needed, why = _NEEDS.get(name, ((), ""))
    return (
        f"needs {', '.join(needed)}, this GPU is {capability}: {why}"
        if needed and capability not in needed
        else ""
    )


def described(recipe: CoreRecipe, compiled: bool) -> RecipeCost:
    """One recipe; eager casts by kernels, compiled ones by generated code."""
    # One scale a tensor needs no second product kernel; the finest granularity decides
    granularity = next((g.granularity for g in recipe.gemms.values() if g.is_fp8), "tensorwise")
    casts = {tensor: _compiled(recipe, tensor) if compiled else _fused(recipe, tensor) for tensor in TENSORS}
    return RecipeCost(
        name=recipe.name,
        by="compiler" if compiled else "kernels",
        casts=casts,
        fp8_gemms=tuple(name for name in GEMMS if recipe.gemms[name].is_fp8),
        kind=ROWWISE if granularity == "rowwise" else TENSORWISE,
        product_share=_PRODUCT_SHARE[granularity],
        fuses_gathers=granularity == "tensorwise",  # pytorch issue 149990
        gathered_weight=_gathered(recipe),
        source="docs/kernels.md" if compiled else "fp8core.kernels.traffic",
    )


def _gathered(recipe: CoreRecipe) -> CastCost | None:
    """The weight's cast where FSDP gathers its codes, which only one scale a tensor lets it do under tensor parallelism too.

    A shard is read, for its amax too if the scale is new, and written as codes; gathered codes are transposed once, backward.
    """
    first = recipe.gemms["output"].b
    if first is None or first.granularity != "tensorwise" or recipe_reason(recipe):
        return None
    return CastCost(3.0 + 2.0 * _whole(first), 2.0)


def _fused(recipe: CoreRecipe, tensor: str) -> CastCost:
    only = {name: (1, 1) if name == tensor else (0, 0) for name in TENSORS}
    total = cast_bytes(recipe, only)
    if not total:
        return CastCost(0.0, kernels=0)
    along_1 = recipe.gemms["output"].a if tensor == "input" else recipe.gemms["output"].b
    forward = 0.0 if tensor == "grad_output" or along_1 is None else one_layout_bytes(along_1)
    return CastCost(total, kernels=2 if total > 4.5 else 1, forward=forward)


def _compiled(recipe: CoreRecipe, tensor: str) -> CastCost:
    """Inductor's count of bytes, divided into ordered and transposing passes as the rules divide theirs."""
    ruled = _by_rules(recipe, tensor)
    total = counted(recipe.name, TENSORS.index(tensor))
    if total is None or not ruled.total:
        return ruled
    part = total / ruled.total
    return CastCost(ruled.streamed * part, ruled.strided * part, ruled.kernels, min(ruled.forward, total))


def _by_rules(recipe: CoreRecipe, tensor: str) -> CastCost:
    along_1, along_0 = _casts(recipe, tensor)
    streamed = strided = forward = 0.0
    kernels = 0
    if along_1 is not None:
        streamed += 3.0 + 2.0 * (_whole(along_1) and tensor != "input")
        forward = streamed if tensor != "grad_output" else 0.0
        kernels += 1 + _whole(along_1)
    if along_0 is not None:
        kernels += 1
        if along_0 == along_1 and along_0.axis_free:
            strided += 2.0
        else:
            strided += 3.0 + 2.0 * (along_0.granularity == "rowwise")
            streamed += 2.0 * _whole(along_0)
    return CastCost(streamed, strided, kernels, forward)


def _casts(recipe: CoreRecipe, tensor: str) -> tuple[CoreCast | None, CoreCast | None]:
    """The casts of a tensor for the GEMM that contracts its columns, and for the one that contracts its rows."""
    first, second = (getattr(recipe.gemms[name], side) for name, side in PLACES[tensor])
    return first, second


def _whole(cast: CoreCast) -> bool:
    """Whether the whole tensor must be read before the first code is written."""
    return cast.granularity == "tensorwise" and cast.scaling == "dynamic"
