"""How a layer's tensors become operands: the one place where a cast is dispatched.

Two routes give the same codes and scales, bit for bit:

    plain     PyTorch operators, `fp8core.cast.scale_and_cast`; codes lie in memory as x does
    kernels   the operators `fp8core::*` of `fp8core.kernels`: a read or two instead of dozens, and codes for a
              contraction of dimension 0 come transposed out of the same read, as FP8 matrix units want them

`why_unfused` decides, and says why. By a recipe's `kernels`, "auto" takes the kernels on an NVIDIA GPU in eager
mode. Under `torch.compile` it takes plain code: the compiler cannot fuse across a custom operator, and otherwise fuses the
amax into the producer of a tensor and the cast into its readers; "always" takes the operators there too, so that a
sweep can tell which of the two is faster. On a CPU "always" runs the operators' plain twins, for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.torch_version import TorchVersion

from fp8core import cast as casts
from fp8core.arguments import PLAIN_TENSORS
from fp8core.formats import E2M1FN
from fp8core.gemm.layout import Operand, transposed
from fp8core.gemm.reference import shapes_alone
from fp8core.kernels import ops
from fp8core.plain_linear import Lines, cast_both_ways, cast_lines
from fp8core.plain_linear import serves_both as serves_both
from fp8core.scaling import amax as plain_amax
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from fp8core.history import Amaxes
    from fp8core.recipe import Cast, Kernels, Recipe

Pair = tuple[torch.Tensor, torch.Tensor]


def why_unfused(x: torch.Tensor, kernels: Kernels, *wanted: Cast | None) -> str | None:
    """Why these casts of x run as plain PyTorch; None if they run as operators `fp8core::*`."""
    if kernels == "always":
        return None
    if kernels == "never":
        return "the recipe says kernels='never'"
    dtypes = [cast.format.dtype for cast in wanted if cast is not None]
    if E2M1FN.dtype in dtypes:
        return "no kernel casts to four bits"
    if torch.compiler.is_compiling():
        if x.is_cuda and INDUCTOR_GARBLES_CASTS:
            return ops.kernel_missing(x, *dtypes)
        return "torch.compile fuses plain code with its neighbours"
    if type(x) not in PLAIN_TENSORS:
        alone = shapes_alone(x)
        if alone and alone.kernels:
            return ops.not_taken(x, *dtypes)
        return f"{type(x).__name__} is a tensor of its own kind"
    return ops.kernel_missing(x, *dtypes)


def inductor_garbles_casts(torch_version: str, hip: str | None) -> bool:
    """Whether Inductor of a version of torch writes what Triton then miscompiles: FP8 codes stored transposed beside a maximum.

    From torch 2.14 on (pytorch #186933) Inductor's maxima and minima are NaN-propagating instructions, beside which Triton
    writes garbage into some transposed, vectorised stores of one byte (triton #11111; torchao #4652 and #4657). Up to
    2.13 they are comparisons, except on ROCm, whose code is not PTX. A later version that is known to be right again
    belongs here. Where this is true the casts are operators `fp8core::*`, which Inductor doesn't write.
    """
    return hip is None and TorchVersion(torch_version) >= "2.14.0.dev20260614"


INDUCTOR_GARBLES_CASTS = inductor_garbles_casts(torch.__version__, torch.version.hip)


def casts_route(weight: torch.Tensor, recipe: Recipe) -> str:
    """ "kernels", or "plain PyTorch: " and why, for a layer's casts in eager mode; as for its weight."""
    reason = why_unfused(weight, recipe.kernels, *recipe.casts)
    return "kernels" if reason is None else f"plain PyTorch: {reason}"


def resolve_kernels(x: torch.Tensor, kernels: Kernels, *wanted: Cast | None) -> Kernels:
    """Return "always" or "never" where `why_unfused` answers "auto" for tensors like x; else `kernels`.

    A layer asks once for a shape. Casts that differ in their answers, and compilers, are left to each cast.
    """
    if kernels != "auto" or torch.compiler.is_compiling() or type(x) not in PLAIN_TENSORS:
        return kernels
    plain = {why_unfused(x, kernels, cast) is not None for cast in wanted if cast is not None}
    return kernels if len(plain) != 1 else "never" if plain.pop() else "always"


def cast_operand(
    x: torch.Tensor,
    cast: Cast | None,
    dim: int,
    memory: Amaxes | None = None,
    role: str = "input",
    *,
    kernels: Kernels = "auto",
    amax: torch.Tensor | None = None,
) -> Operand | torch.Tensor:
    """Cast one operand into lines along the dimension that its GEMM contracts.

    Args:
        x: a matrix in high precision, or a Float8Tensor, whose codes are taken as they are.
        cast: None leaves x in high precision.
        dim: the dimension that the GEMM contracts.
        memory: the layer's amaxes, for delayed and static casts.
        role: which of `fp8core.history.ROLES` x is.
        kernels: of the recipe.
        amax: of x, float32, 0-dimensional, if whoever made x has it, or of all that shares x's scale where x is a part
            of it: what a tensorwise cast goes by.

    Returns:
        `Operand`: codes [M, K] for dim 1 and [K, M] for dim 0, scales in the same orientation; a plain pair, since a
        Float8Tensor costs as much host time as the cast. Without a cast: x [M, K], or x.t().
    """
    if isinstance(x, Float8Tensor):
        return Operand(x.qdata, x.scale_inv) if dim == 1 else transposed(x)
    if cast is None:
        return x if dim == 1 else x.t()
    if kernels == "always" or why_unfused(x, kernels, cast) is None:
        lines, lines_0 = _by_kernel(x, cast, memory, role, amax, both=dim == 0)
        return lines if lines_0 is None or dim == 1 else lines_0
    return _plain(x, cast, dim, memory, role, amax)


def cast_operand_pair(
    x: torch.Tensor,
    along_1: Cast | None,
    along_0: Cast | None,
    memory: Amaxes | None = None,
    role: str = "input",
    *,
    kernels: Kernels = "auto",
    amax: torch.Tensor | None = None,
    once: bool = False,
) -> tuple[Operand | torch.Tensor, Operand | torch.Tensor]:
    """Cast a matrix for two GEMMs, of which one contracts dimension 1 and the other dimension 0.

    Returns:
        (lines [M, K] for the first, lines [K, M] for the second), each as `cast_operand`. With `once`, where one plain cast
        serves both: it, twice, not transposed.
    """
    same = along_1 is not None and (along_1 is along_0 or along_1 == along_0)
    if same and not isinstance(x, Float8Tensor):
        assert along_1 is not None
        if kernels == "always" or why_unfused(x, kernels, along_1) is None:
            lines, lines_0 = _by_kernel(x, along_1, memory, role, amax, both=True)
            assert lines_0 is not None
            return lines, lines_0
        if not along_1.axis_free:
            return cast_both_ways(x, along_1, along_0)
        plain = _plain(x, along_1, 1, memory, role, amax)
        assert isinstance(plain, Operand)
        return plain, plain if once else transposed(plain)
    return (
        cast_operand(x, along_1, 1, memory, role, kernels=kernels, amax=amax),
        cast_operand(x, along_0, 0, memory, role, kernels=kernels, amax=amax),
    )


def cast_one(
    x: torch.Tensor,
    cast: Cast | None,
    dim: int,
    memory: Amaxes | None = None,
    role: str = "input",
    *,
    kernels: Kernels = "auto",
    amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cast one operand as its GEMM takes it; arguments as of `cast_operand`.

    Returns:
        Float8Tensor of x's shape, or x where it is one already or stays. Codes made by kernels lie contiguous along `dim`.
    """
    if cast is None or isinstance(x, Float8Tensor):
        return x
    return _wrapped(x, cast, cast_operand(x, cast, dim, memory, role, kernels=kernels, amax=amax), dim == 0)


def cast_both(
    x: torch.Tensor,
    along_1: Cast | None,
    along_0: Cast | None,
    memory: Amaxes | None = None,
    role: str = "input",
    *,
    kernels: Kernels = "auto",
    amax: torch.Tensor | None = None,
) -> Pair:
    """Cast a matrix as operand of two GEMMs, of which one contracts dimension 1 and the other dimension 0.

    Returns:
        (for the first, for the second), each as `cast_one`; plain, the same object where one cast serves both.
    """
    if isinstance(x, Float8Tensor):
        return x, x
    lines, lines_0 = cast_operand_pair(
        x, along_1, along_0, memory, role, kernels=kernels, amax=amax, once=True
    )
    first = _wrapped(x, along_1, lines, False)
    return first, first if lines_0 is lines else _wrapped(x, along_0, lines_0, True)


def fused_for_both(x: torch.Tensor, first: Cast | None, second: Cast | None, kernels: Kernels) -> bool:
    """Whether casting x for two GEMMs at once takes fewer reads than casting it for one, and later for the other."""
    if first is None or not (first is second or first == second):
        return False
    return first.axis_free or why_unfused(x, kernels, first) is None


def find_amax(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Amax of the whole tensor, 0-d float32; by a kernel or plain, as its casts are made."""
    return plain_amax(x) if why_unfused(x, kernels) is not None else ops.amax(x)


def _wrapped(x: torch.Tensor, cast: Cast | None, lines: Lines, turned: bool) -> torch.Tensor:
    """Codes of x as the cast made them, or x where there is none; a compiler traces the constructor alone."""
    if cast is None:
        return x
    if cast.is_four_bit:
        raise ValueError(
            f"{cast}: a Float8Tensor holds one code a byte and one level of scales; fp8core.four_bits.quantize_lines casts to e2m1"
        )
    assert isinstance(lines, Operand)
    codes, scale_inv, _ = transposed(lines) if turned else lines
    make = Float8Tensor if torch.compiler.is_compiling() else Float8Tensor.of_cast
    return make(codes, scale_inv, x.dtype, cast.granularity)


def _plain(
    x: torch.Tensor, cast: Cast, dim: int, memory: Amaxes | None, role: str, amax: torch.Tensor | None
) -> Lines:
    """Cast by PyTorch operators: dozens of reads and writes in eager mode. Codes lie in memory as x does."""
    remembers = memory if cast.scaling != "dynamic" else None
    if remembers is None:
        return cast_lines(x, cast, dim, role, amax)
    expected = remembers.of(role)
    if expected is None:
        amax = plain_amax(x) if amax is None else amax
        lines = cast_lines(x, cast, dim, role, amax)
    else:
        codes, scale_inv, amax = casts.cast_with_amax(
            x, cast.format, expected, margin=remembers.settings.margin, power_of_two=cast.power_of_two
        )
        lines = Operand(codes, scale_inv) if dim == 1 else Operand(codes.t(), scale_inv)
    remembers.record(role, amax)
    return lines


_GROUPED = {"rowwise": "cast_rowwise", "1x128": "cast_1x128", "1x32": "cast_mx"}


def _by_kernel(
    x: torch.Tensor,
    cast: Cast,
    memory: Amaxes | None,
    role: str,
    amax: torch.Tensor | None,
    *,
    both: bool,
) -> tuple[Operand, Operand | None]:
    """Cast x [M, K] by a kernel: lines [M, K] for a contraction of K, and with `both` lines [K, M], row-major, for one of M."""
    dtype, pow2, suffix = cast.format.dtype, cast.power_of_two, "_both" if both else ""
    if cast.granularity == "128x128":
        codes, codes_t, scale_inv = ops.cast_128x128_both(x, dtype, pow2)
        return Operand(codes, scale_inv), Operand(codes_t, scale_inv.t())
    if cast.granularity in _GROUPED:
        how = cast.mx_mode if cast.granularity == "1x32" else pow2
        made = getattr(ops, _GROUPED[cast.granularity] + suffix)(x, dtype, how)
        return Operand(*made[:2]), Operand(*made[2:]) if both else None
    remembers = memory if cast.scaling != "dynamic" else None
    expected = None if remembers is None else remembers.of(role)
    if expected is None or remembers is None:
        seen = ops.amax(x) if amax is None else amax
        *codes, scale_inv = getattr(ops, "cast" + suffix)(x, seen, dtype, pow2)
    else:
        made = getattr(ops, "cast_delayed" + suffix)(x, expected, dtype, pow2, remembers.settings.margin)
        *codes, scale_inv, seen = made
    if remembers is not None:
        remembers.record(role, seen)
    return Operand(codes[0], scale_inv), Operand(codes[1], scale_inv) if both else None


def expected_amax(cast: Cast, memory: Amaxes | None, role: str) -> torch.Tensor | None:
    """The amax of earlier steps that a delayed or static cast goes by, once there is one."""
    return None if cast.scaling == "dynamic" or memory is None else memory.of(role)
